/**
 * The connection as a pure state machine: `next(state, event)` returns the new state and a list of
 * effects for the caller to carry out. Nothing here reads a clock, the network or the page, so the
 * whole life of a session can be tested by listing events.
 *
 * Phases:
 *   loading       the server's description is being fetched
 *   idle          ready; nobody connected
 *   locked        the server wants an access token
 *   connecting    offer sent, or media not yet shown
 *   live          pictures arrive
 *   waiting       the server refused for now; another try at `retryAt`
 *   reconnecting  the link broke; another try at `retryAt` with the resume token
 *   failed        gave up, or the server ended it; `problem` says why
 */

/** Longest wait between an offer and the first picture, in ms. */
export const CONNECT_LIMIT_MS = 15_000;
/** How long a broken link is tried again before giving up, in ms. */
export const RECONNECT_LIMIT_MS = 60_000;
/** How long a refusing server is asked again before giving up, in ms. */
export const WAIT_LIMIT_MS = 600_000;

const BACKOFF_MS = [250, 1_000, 2_000, 4_000, 8_000];

export const INITIAL = Object.freeze({
  phase: "loading",
  problem: null,
  attempt: 0,
  since: 0,
  openedAt: 0,
  retryAt: null,
  location: null,
  resumeToken: null,
});

/** Milliseconds before try number `attempt` (from 0) of a broken link. */
export function backoff(attempt) {
  return BACKOFF_MS[Math.min(attempt, BACKOFF_MS.length - 1)];
}

/** Whether a session exists, or is being made, that the user can end. */
export function isOpen(state) {
  return ["connecting", "live", "waiting", "reconnecting"].includes(state.phase);
}

/**
 * One step of the machine.
 *
 * @param {object} state one of this module's states; never changed in place.
 * @param {{type: string, now: number}} event what happened, with the time in ms.
 * @returns {[object, {type: string}[]]} the next state and the effects: `load`, `open` (with
 *   `resumeToken`), `close` (with `location`, to be deleted on the server if not null).
 */
export function next(state, event) {
  const handler = HANDLERS[event.type];
  if (!handler) throw new Error(`unknown event ${event.type}`);
  return handler(state, event) ?? [state, []];
}

const fresh = (phase, extra = {}) => ({ ...INITIAL, phase, ...extra });
const close = (state) => ({ type: "close", location: state.location });
const open = (state) => ({ type: "open", resumeToken: state.resumeToken });

function fail(state, problem) {
  return [fresh("failed", { problem }), [close(state)]];
}

function connect(state, now) {
  const since = isOpen(state) ? state.since : now;
  const connecting = { ...state, phase: "connecting", since, openedAt: now, retryAt: null };
  return [connecting, [open(connecting)]];
}

/** Schedules another try of a broken link, or gives up after `RECONNECT_LIMIT_MS`. */
function lose(state, now, problem) {
  const since = state.phase === "live" ? now : state.since;
  if (now - since > RECONNECT_LIMIT_MS) return fail(state, problem);
  const retryAt = now + backoff(state.attempt);
  const attempt = state.attempt + 1;
  // The old session is not deleted: the resume token is to find it again.
  const effects = [{ type: "close", location: null }];
  return [{ ...state, phase: "reconnecting", problem, since, attempt, retryAt }, effects];
}

const HANDLERS = {
  configured: (state, { locked = false }) => {
    if (state.phase !== "loading") return null;
    return locked
      ? [fresh("locked", { problem: { kind: "token_needed" } }), []]
      : [fresh("idle"), []];
  },

  config_failed: (state, { problem, now }) => {
    if (state.phase !== "loading") return null;
    const retryAt = now + backoff(state.attempt + 1);
    return [{ ...state, problem, attempt: state.attempt + 1, retryAt }, []];
  },

  unlock: (state) => (state.phase === "locked" ? [fresh("idle"), []] : null),

  start: (state, { resumeToken = null, now }) => {
    if (state.phase !== "idle" && state.phase !== "failed") return null;
    return connect(fresh("idle", { resumeToken }), now);
  },

  answered: (state, { location, resumeToken }) =>
    state.phase === "connecting" ? [{ ...state, location, resumeToken }, []] : null,

  playing: (state) =>
    state.phase === "connecting"
      ? [{ ...state, phase: "live", problem: null, attempt: 0, since: 0 }, []]
      : null,

  // The session to be resumed has ended meanwhile: make a new one.
  gone: (state, { now }) => {
    if (state.phase !== "connecting" || state.resumeToken === null) return null;
    return connect({ ...state, resumeToken: null, location: null }, now);
  },

  refused: (state, { problem, retryAfterS, now }) => {
    if (state.phase !== "connecting") return null;
    if (now - state.since > WAIT_LIMIT_MS) return fail(state, { kind: "gave_up" });
    const retryAt = now + Math.max(1, retryAfterS) * 1000;
    const waiting = { ...state, phase: "waiting", problem, retryAt, attempt: state.attempt + 1 };
    return [waiting, [{ type: "close", location: null }]];
  },

  rejected: (state, { problem }) => {
    if (state.phase !== "connecting") return null;
    if (problem.kind === "unauthorized") {
      return [fresh("locked", { problem }), [close(state)]];
    }
    return fail(state, problem);
  },

  lost: (state, { problem, now }) =>
    state.phase === "live" || state.phase === "connecting" ? lose(state, now, problem) : null,

  // The server ended the session, or moved it to another page: nothing is left to delete.
  fatal: (state, { problem }) =>
    isOpen(state) ? fail({ ...state, location: null }, problem) : null,

  retry_now: (state, { now }) => {
    if (state.phase === "loading") return [{ ...state, retryAt: null }, [{ type: "load" }]];
    if (state.phase === "waiting" || state.phase === "reconnecting") return connect(state, now);
    return null;
  },

  tick: (state, { now }) => {
    if (state.retryAt !== null && now >= state.retryAt) {
      return next(state, { type: "retry_now", now });
    }
    if (state.phase === "connecting" && now - state.openedAt > CONNECT_LIMIT_MS) {
      return lose(state, now, { kind: "no_media" });
    }
    return null;
  },

  end: (state) => (isOpen(state) ? [fresh("idle"), [close(state)]] : null),
};

/** Whole seconds until the next try, at least 0; null when none is planned. */
export function secondsLeft(state, now) {
  return state.retryAt === null ? null : Math.max(0, Math.ceil((state.retryAt - now) / 1000));
}
