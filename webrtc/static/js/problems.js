/** HTTP answers and exceptions as problems: `{kind, detail, ...}`, whose kinds words.js knows. */

/** An error that carries a problem. */
export class Trouble extends Error {
  constructor(problem) {
    super(problem.detail ?? problem.kind);
    this.name = "Trouble";
    this.problem = problem;
  }
}

const BY_STATUS = {
  401: "unauthorized",
  403: "forbidden_origin",
  404: "not_found",
  409: "busy",
  413: "too_large",
  415: "unsupported_media",
  429: "busy",
  501: "no_text",
  503: "full",
};

/**
 * The problem behind an HTTP answer of 4xx or 5xx.
 *
 * @param {number} status of the answer.
 * @param {string | null} retryAfter the header of that name: seconds, or a date, or absent.
 * @param {unknown} body the parsed problem+json, or null.
 */
export function fromAnswer(status, retryAfter, body) {
  const kind = typeof body?.reason === "string" ? body.reason : BY_STATUS[status];
  const detail = typeof body?.detail === "string" ? body.detail : body?.title;
  return {
    kind: kind ?? (status >= 500 ? "failed" : "invalid"),
    detail: detail ?? `The server answered with status ${status}.`,
    retryAfterS: retrySeconds(retryAfter),
  };
}

/** Seconds of a Retry-After header; 2 when it is absent or a date, 60 at most. */
export function retrySeconds(header) {
  const value = Number.parseFloat(header ?? "");
  return Number.isFinite(value) && value >= 0 ? Math.min(value, 60) : 2;
}

/** The problem of any exception; what is no `Trouble` is shown with the exception's own words. */
export function fromError(error) {
  if (error instanceof Trouble) return error.problem;
  return { kind: "failed", detail: String(error?.message ?? error) };
}

/** The machine's event for a problem that met an offer. */
export function offerEvent(problem, now) {
  switch (problem.kind) {
    case "full":
    case "not_ready":
    case "draining":
      return { type: "refused", problem, retryAfterS: problem.retryAfterS, now };
    case "not_found":
      return { type: "gone", now };
    case "unreachable":
      return { type: "lost", problem, now };
    default:
      return { type: "rejected", problem, now };
  }
}

const ENDINGS = ["shutdown", "replaced", "idle", "deleted"];

/** The problem of a session that the server closed for `reason`. */
export function fromEnding(reason) {
  if (ENDINGS.includes(reason)) return { kind: reason };
  return { kind: "failed", detail: String(reason ?? "").replace(/^failed:\s*/, "") };
}
