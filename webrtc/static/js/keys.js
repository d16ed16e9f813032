/** Keyboard shortcuts: which key does what, and when a key belongs to the page at all. */

/** Single keys; gestures are on the digits. */
export const KEYS = Object.freeze({
  m: "mic",
  f: "file",
  s: "stop",
  escape: "stop",
  t: "text",
  r: "record",
  v: "sound",
  "?": "help",
});

export const HELP = Object.freeze([
  ["M", "Microphone on or off"],
  ["F", "Choose a sound file"],
  ["S", "Stop speaking (also Esc)"],
  ["T", "Type something to say"],
  ["R", "Record on or off"],
  ["V", "Sound on or off"],
  ["1 – 6", "Gestures"],
  ["?", "This list"],
]);

/**
 * The action of a key press, or null.
 *
 * @param {{key: string, ctrlKey?: boolean, metaKey?: boolean, altKey?: boolean, repeat?: boolean,
 *   target?: {tagName?: string, type?: string, isContentEditable?: boolean}}} event
 * @param {{enabled: boolean, dialogOpen: boolean, gestures: number}} options
 * @returns {string | null} an action of `KEYS`, or "gesture:N" with N from 0.
 */
export function action(event, { enabled, dialogOpen, gestures }) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || dialogOpen) return null;
  const key = event.key.toLowerCase();
  // Esc is no character: it stops from everywhere, even where single keys are off or text goes in.
  if (key === "escape") return KEYS.escape;
  if (!enabled || takesText(event.target)) return null;
  const digit = Number.parseInt(key, 10);
  if (key.length === 1 && digit >= 1) return digit <= gestures ? `gesture:${digit - 1}` : null;
  return Object.hasOwn(KEYS, key) ? KEYS[key] : null;
}

const PLAIN_INPUTS = ["radio", "checkbox", "button", "submit", "file"];

function takesText(target) {
  const tag = target?.tagName?.toLowerCase();
  if (target?.isContentEditable || tag === "textarea" || tag === "select") return true;
  return tag === "input" && !PLAIN_INPUTS.includes(target.type);
}
