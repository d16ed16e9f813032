/**
 * What the page says when something is in the way: what happened, what it means, what to do. Each
 * notice has a `tone` (info, warn, error), a `title`, a `body` and at most one `action`, whose id
 * the controls know.
 */

import { bytes, seconds } from "./format.js";

const TRY_AGAIN = { id: "start", label: "Try again" };
const TRY_NOW = { id: "retry", label: "Try now" };
const DISMISS = { id: "dismiss", label: "Close" };

const NOTICES = {
  // Getting there
  not_ready: () => ({
    tone: "info",
    title: "The server is starting",
    body: "The model is warming up. You need not do anything.",
    action: TRY_NOW,
  }),
  full: () => ({
    tone: "warn",
    title: "All places are taken",
    body: "Others are talking to the avatar. You keep waiting here.",
    action: TRY_NOW,
  }),
  draining: () => ({
    tone: "warn",
    title: "The server is about to restart",
    body: "It takes no new sessions now.",
    action: TRY_NOW,
  }),
  reconnecting: () => ({
    tone: "warn",
    title: "Connection lost",
    body: "Getting your session back.",
    action: TRY_NOW,
  }),
  lost: () => ({
    tone: "error",
    title: "Connection lost",
    body: "It did not come back within a minute.",
    action: TRY_AGAIN,
  }),
  unreachable: () => ({
    tone: "error",
    title: "The server does not answer",
    body: "Check that it is running and that you are online.",
    action: TRY_NOW,
  }),
  no_media: () => ({
    tone: "error",
    title: "No picture came through",
    body:
      "The server answered, but no media arrived. A firewall may block UDP; " +
      "the server then needs a TURN relay.",
    action: TRY_NOW,
  }),
  gave_up: () => ({
    tone: "warn",
    title: "Still no free place",
    body: "We stopped asking after ten minutes.",
    action: TRY_AGAIN,
  }),
  token_needed: () => ({
    tone: "info",
    title: "This server is private",
    body: "Paste the access token that was printed when it started.",
    action: null,
  }),
  unauthorized: () => ({
    tone: "error",
    title: "The access token was not accepted",
    body: "Check that it is complete and belongs to this server.",
    action: null,
  }),
  forbidden_origin: () => ({
    tone: "error",
    title: "The server does not serve this address",
    body: "Open the page under the address that the server printed, or allow this one at its start.",
    action: null,
  }),
  no_webrtc: () => ({
    tone: "error",
    title: "This browser cannot play live video",
    body: "WebRTC is missing or switched off. A current Chrome, Edge, Firefox or Safari has it.",
    action: null,
  }),
  version: () => ({
    tone: "error",
    title: "Page and server do not match",
    body: "The server was updated while this page was open. Reload the page.",
    action: { id: "reload", label: "Reload" },
  }),

  // Endings
  shutdown: () => ended("The server was shut down.", TRY_AGAIN),
  replaced: () => ended("It goes on in another tab or window.", TRY_AGAIN),
  idle: () => ended("Nothing happened for a long time.", TRY_AGAIN),
  deleted: () => ended("It was closed on the server.", TRY_AGAIN),
  failed: ({ detail }) => ({
    tone: "error",
    title: "The session stopped with an error",
    body: detail || "The server gave no reason.",
    action: TRY_AGAIN,
  }),

  // Sound and microphone
  autoplay_blocked: () => ({
    tone: "info",
    title: "Sound is off",
    body: "Your browser waits for a click before a page may play sound.",
    action: { id: "unmute", label: "Turn sound on" },
  }),
  insecure: ({ host }) => ({
    tone: "warn",
    title: "The microphone needs HTTPS",
    body:
      `Browsers give no microphone to ${host ? `http://${host}` : "plain HTTP"}. Open the page on ` +
      "this computer as http://localhost, or start the server with a TLS certificate. " +
      "Files and text work as they are.",
    action: DISMISS,
  }),
  mic_denied: () => ({
    tone: "warn",
    title: "The microphone is blocked",
    body: "Allow it for this page in the browser's address bar, then press the button again.",
    action: DISMISS,
  }),
  mic_missing: () => ({
    tone: "warn",
    title: "No microphone found",
    body: "Plug one in, or drop a sound file onto the picture.",
    action: DISMISS,
  }),
  mic_busy: () => ({
    tone: "warn",
    title: "The microphone is in use",
    body: "Another program holds it. Close that one, then press the button again.",
    action: DISMISS,
  }),

  // Files, text, recording
  too_large: ({ size, limit }) => ({
    tone: "warn",
    title: "This file is too large",
    body: `${size ? `It has ${bytes(size)}; ` : ""}the limit is ${bytes(limit)}.`,
    action: DISMISS,
  }),
  unsupported_media: ({ name }) => ({
    tone: "warn",
    title: "This file holds no sound we can read",
    body: `${name ? `“${name}”: ` : ""}WAV, MP3, M4A, OGG, FLAC and WebM work.`,
    action: DISMISS,
  }),
  invalid: ({ detail }) => ({
    tone: "warn",
    title: "The server did not take that",
    body: detail || "It gave no reason.",
    action: DISMISS,
  }),
  too_long: ({ limit }) => ({
    tone: "warn",
    title: "This sound is too long",
    body: `The limit is ${seconds(limit)}.`,
    action: DISMISS,
  }),
  busy: () => ({
    tone: "warn",
    title: "One thing at a time",
    body: "A file is still being spoken. Press Stop first, or wait for its end.",
    action: DISMISS,
  }),
  no_text: () => ({
    tone: "info",
    title: "No synthesizer on the server",
    body: "Install espeak-ng or flite there to have text spoken. Files and the microphone work.",
    action: DISMISS,
  }),
  no_recorder: () => ({
    tone: "warn",
    title: "This browser cannot record",
    body: "Use a current Chrome, Edge, Firefox or Safari.",
    action: DISMISS,
  }),
};

function ended(body, action) {
  return { tone: "info", title: "The session ended", body, action };
}

/**
 * The notice of a problem; a kind that has none of its own is shown with the server's words.
 *
 * @param {object} problem `kind`, and what its words need; `left`: seconds until the next try.
 * @returns {{tone: string, title: string, body: string, action: object | null,
 *   countdown: string}} the countdown is apart from the body, since it changes every second.
 */
export function notice({ kind, left = null, ...facts }) {
  const make = NOTICES[kind];
  const words = make ? make(facts) : NOTICES.failed({ ...facts, detail: facts.detail || kind });
  return {
    ...words,
    countdown: left === null ? "" : left > 0 ? `Next try in ${left} s.` : "Trying …",
  };
}

export const KINDS = Object.freeze(Object.keys(NOTICES));

/**
 * The notice of the connection's state, or null when nothing is in the way.
 *
 * @param {object} state of machine.js.
 * @param {number | null} left seconds until the next try.
 */
export function connectionNotice(state, left) {
  if (!state.problem) return null;
  const trying = state.phase === "connecting" ? 0 : left;
  const resuming = state.problem.kind === "lost" && state.phase !== "failed";
  const kind = resuming ? "reconnecting" : state.problem.kind;
  return notice({ ...state.problem, kind, left: trying });
}

/** The kind of problem behind an error of `getUserMedia`. */
export function microphoneProblem(error) {
  const kinds = {
    NotAllowedError: "mic_denied",
    SecurityError: "mic_denied",
    NotFoundError: "mic_missing",
    OverconstrainedError: "mic_missing",
    NotReadableError: "mic_busy",
    AbortError: "mic_busy",
  };
  return kinds[error?.name] ?? "mic_missing";
}

const STATUS = {
  loading: "Loading",
  idle: "Ready",
  locked: "Locked",
  connecting: "Connecting",
  waiting: "Waiting",
  reconnecting: "Reconnecting",
  failed: "Stopped",
};

/** One or two words for the state, as shown beside the name. */
export function status(state, face) {
  if (state.phase !== "live") return STATUS[state.phase];
  if (face.speaking) return "Speaking";
  return { idle: "Live", listening: "Listening", thinking: "Thinking", speaking: "Live" }[
    face.state
  ];
}
