/**
 * The control channel's messages: builders for what the page sends, one parser for what comes.
 * The schema is that of the service; a message of another version or shape is an error, not a
 * guess.
 */

export const VERSION = 1;
export const CHANNEL = "control";

const message = (type, fields = {}) => ({ version: VERSION, type, ...fields });

export const speak = (text) => message("speak", { text });
export const stop = () => message("stop");
export const setState = (state) => message("set_state", { state });
export const triggerEvent = (event) => message("trigger_event", { event });
export const setAvatar = (avatar) => message("set_avatar", { avatar });
export const setQuality = (steps) => message("set_quality", { num_inference_steps: steps });
export const microphone = (on) => message("mic", { on });
export const ping = (timeMs) => message("ping", { time_ms: timeMs });

const number = (value) => typeof value === "number";
const text = (value) => typeof value === "string";
const flag = (value) => typeof value === "boolean";
const object = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

const SHAPES = {
  session: { state: text },
  pong: { time_ms: number },
  started: { generation: number, position_s: number },
  finished: { generation: number, position_s: number, interrupted: flag },
  stats: { units: number, late: number, real_time_factor: number, stage_ms: object },
  media: { fps: number },
  error: { message: text, fatal: flag },
};

/**
 * Reads one message of the server.
 *
 * @param {string} data the text of a data channel or websocket message.
 * @returns {object} the message; unknown types are returned as they are, to be ignored.
 * @throws {Error} no JSON object, another version, or a known type with a missing field.
 */
export function parse(data) {
  const body = JSON.parse(data);
  if (!object(body)) throw new Error(`expected a JSON object, got ${data.slice(0, 80)}`);
  if (body.version !== VERSION) {
    throw new Error(`expected protocol version ${VERSION}, got ${body.version}; reload the page`);
  }
  for (const [field, test] of Object.entries(SHAPES[body.type] ?? {})) {
    if (!test(body[field]))
      throw new Error(`${body.type}.${field} has a wrong value: ${body[field]}`);
  }
  return body;
}

/**
 * The face's state as the page shows it, from what the server reported.
 *
 * @param {{state: string, speaking: boolean, interrupted: boolean}} face the state before.
 * @param {object} body a message of the server, or one that the page sent.
 */
export function face(before, body) {
  switch (body.type) {
    case "started":
      return { ...before, speaking: true, interrupted: false };
    case "finished":
      return { ...before, speaking: false, interrupted: body.interrupted };
    case "set_state":
      return { ...before, state: body.state };
    default:
      return before;
  }
}

export const SILENT = Object.freeze({ state: "idle", speaking: false, interrupted: false });
