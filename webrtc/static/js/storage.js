/** The few things that outlive a page: the access token, the resume token, whether keys are on. */

const TOKEN = "rtgen.token";
const RESUME = "rtgen.resume";
const KEYS_OFF = "rtgen.keys-off";
/** For how long the server keeps a session whose page went away, with a second to spare, in ms. */
export const RESUME_LIMIT_MS = 7_000;

/** The access token of the address's fragment (`#token=...`), which is then removed from it. */
export function readToken() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (token) {
    saveToken(token);
    history.replaceState(null, "", location.pathname + location.search);
  }
  return sessionStorage.getItem(TOKEN);
}

export function saveToken(token) {
  sessionStorage.setItem(TOKEN, token);
}

/** Keeps a session's resume token across a reload. */
export function saveResume(token) {
  sessionStorage.setItem(RESUME, JSON.stringify({ token, at: Date.now() }));
}

/** Takes the resume token out, if it is young enough to be of use; else null. */
export function takeResume() {
  const text = sessionStorage.getItem(RESUME);
  sessionStorage.removeItem(RESUME);
  return text ? freshToken(JSON.parse(text), Date.now()) : null;
}

/** The token of an entry that is at most `RESUME_LIMIT_MS` old, else null. */
export function freshToken({ token, at }, now) {
  return now - at >= 0 && now - at <= RESUME_LIMIT_MS ? token : null;
}

export function keysEnabled() {
  return localStorage.getItem(KEYS_OFF) === null;
}

export function enableKeys(on) {
  if (on) localStorage.removeItem(KEYS_OFF);
  else localStorage.setItem(KEYS_OFF, "1");
}
