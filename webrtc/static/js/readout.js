/**
 * What the panel shows, as plain text, from what was measured. Every figure names its source, since
 * a number without one cannot be trusted: the browser's statistics, the control channel, the server.
 */

import * as format from "./format.js";

/** Sounds that lead or lag by less than this are not noticed (ITU-R BT.1359, the tighter side). */
const AV_LIMIT_MS = 45;

/**
 * The four large figures.
 *
 * @param {object} measured
 * @param {object | null} measured.rates of rates.js.
 * @param {{p50: number | null, p95: number | null}} measured.latency ms, over ten seconds.
 * @param {number | undefined} measured.expectedFps pictures a second that the model makes.
 * @returns {Record<string, {value: string, more: string}>}
 */
export function tiles({ rates, latency, expectedFps }) {
  return {
    fps: {
      value: format.decimal(rates?.fps),
      more: expectedFps ? `of ${format.decimal(expectedFps)} wanted` : "",
    },
    latency: {
      value: format.milliseconds(latency.p50),
      more: latency.p95 === null ? "" : `p95 ${format.milliseconds(latency.p95)}`,
    },
    av: {
      value: format.offset(rates?.avOffsetMs),
      more: avWords(rates?.avOffsetMs),
    },
    freezes: {
      value: rates?.freezes == null ? format.UNKNOWN : String(rates.freezes),
      more: rates?.freezes == null ? "" : `${format.percent(rates.frozenShare)} of the time`,
    },
  };
}

function avWords(offsetMs) {
  if (offsetMs === null || offsetMs === undefined) return "";
  if (Math.abs(offsetMs) <= AV_LIMIT_MS) return "in step";
  return offsetMs > 0 ? "picture ahead" : "sound ahead";
}

/** Rows of the browser's own measurements: [label, source, value]. */
export function browserRows(measured) {
  const { rates, sendToReceiveMs, receiveToDisplay, pingMs, firstPictureMs, stopToSilenceMs } =
    measured;
  const r = rates ?? {};
  const size = r.width ? `${r.width} × ${r.height}` : format.UNKNOWN;
  const buffers = { p50: r.jitterBufferVideoMs, p95: r.jitterBufferAudioMs };
  return [
    ["Received", "picture and sound", format.bitrate(r.bitrate)],
    ["Packets lost", "last second", format.percent(r.loss)],
    ["Network round trip", "ICE checks", format.milliseconds(r.roundTripMs)],
    ["Control round trip", "ping over the data channel", format.milliseconds(pingMs)],
    ["Jitter buffer", "picture / sound", pair(buffers)],
    ["Sent to received", "by RTCP reports and pings", format.milliseconds(sendToReceiveMs)],
    ["Received to displayed", "p50 / p95", pair(receiveToDisplay)],
    ["Decoding", "per picture", format.milliseconds(r.decodeMs)],
    ["Picture", [r.codec, r.route].filter(Boolean).join(", "), size],
    ["First picture", "after the connection was asked for", format.milliseconds(firstPictureMs)],
    ["Stop to silence", "heard in this page", format.milliseconds(stopToSilenceMs)],
  ];
}

function pair({ p50, p95 }) {
  return `${format.decimal(p50)} / ${format.decimal(p95)} ms`;
}

/** Rows of what the server reports about this session. */
export function serverRows({ stats, media }) {
  const factor = stats?.real_time_factor;
  const m = media ?? {};
  const target = m.target_kbps === undefined ? "" : `target ${format.bitrate(1e3 * m.target_kbps)}`;
  const late = m.late_ms?.p95;
  return [
    [
      "Generation speed",
      "media time per time",
      factor == null ? format.UNKNOWN : `${format.decimal(factor, 2)} ×`,
    ],
    ["Speech waiting", "", format.seconds(stats?.buffered_s)],
    ["Units late", `of ${format.decimal(stats?.units)} made`, format.decimal(stats?.late)],
    ["Fresh pictures sent", "in the last second", format.decimal(m.fps)],
    ["Pictures repeated", "in all", format.decimal(m.repeated)],
    ["Sending late", "p95", format.milliseconds(late)],
    [
      "Picture bitrate",
      target,
      format.bitrate(m.bitrate_kbps == null ? null : 1e3 * m.bitrate_kbps),
    ],
  ];
}

/**
 * Stage times with their share of the time there is.
 *
 * @param {object} measured
 * @param {Record<string, {p50: number, p95: number}>} measured.stages per unit, ms.
 * @param {{p50: number, p95: number} | null} measured.encode per picture, ms.
 * @param {number} measured.unitMs duration of one unit.
 * @param {number} measured.frameMs duration of one picture.
 * @returns {{name: string, p50: string, p95: string, half: number, most: number}[]} `half` and
 *   `most` are p50 and p95 as shares of the duration, cut at 1.
 */
export function stageRows({ stages, encode, unitMs, frameMs }) {
  const row = (name, { p50, p95 }, budget) => ({
    name: format.label(name),
    p50: format.decimal(p50, 1),
    p95: format.decimal(p95, 1),
    half: share(p50, budget),
    most: share(p95, budget),
  });
  const rows = Object.entries(stages ?? {}).map(([name, times]) => row(name, times, unitMs));
  if (encode?.p50 != null) rows.push(row("encode", encode, frameMs));
  return rows;
}

function share(value, budget) {
  return budget > 0 && value > 0 ? Math.min(1, value / budget) : 0;
}

/**
 * Points of a sparkline in a box of 100 x 24, the newest at the right.
 *
 * @param {(number | null)[]} values oldest first; unknown ones are left out.
 * @param {number} capacity values that fill the box's width.
 */
export function sparkline(values, capacity) {
  const known = values.filter((v) => v !== null && Number.isFinite(v));
  if (known.length < 2) return "";
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const span = Math.max(high - low, 0.1 * Math.abs(high), 1e-9);
  const middle = (low + high) / 2;
  const step = 100 / (capacity - 1);
  const start = 100 - step * (values.length - 1);
  return values
    .map((v, i) => [start + step * i, v])
    .filter(([, v]) => v !== null && Number.isFinite(v))
    .map(([x, v]) => `${x.toFixed(1)},${(12 - (20 * (v - middle)) / span).toFixed(1)}`)
    .join(" ");
}
