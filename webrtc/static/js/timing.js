/** The server's clock, true latency, and the video buffer that keeps picture and sound together. */

/** Milliseconds between the epochs of NTP (1900) and Unix (1970). */
const NTP_EPOCH_MS = 2_208_988_800_000;
const PINGS_KEPT = 30;

/**
 * The server's wall clock as seen from here, by pings: of the last ones the quickest is believed,
 * since its error is at most half its round trip.
 */
export class ServerClock {
  #pings = [];

  /** Milliseconds of the last ping's way there and back; null before the first. */
  get roundTripMs() {
    return this.#pings.at(-1)?.roundTrip ?? null;
  }

  /** What to add to the local wall clock to get the server's, in ms; null when not known. */
  get offsetMs() {
    const timed = this.#pings.filter(({ offset }) => offset !== null);
    if (!timed.length) return null;
    return timed.reduce((a, b) => (b.roundTrip < a.roundTrip ? b : a)).offset;
  }

  /**
   * Takes the answer to a ping.
   *
   * @param {number} sent local wall clock when the ping left, ms since 1970.
   * @param {number} received the same when its answer came.
   * @param {number | undefined} serverTime the server's wall clock when it answered.
   */
  add(sent, received, serverTime) {
    const offset = Number.isFinite(serverTime) ? serverTime - (sent + received) / 2 : null;
    this.#pings.push({ roundTrip: received - sent, offset });
    if (this.#pings.length > PINGS_KEPT) this.#pings.shift();
  }

  clear() {
    this.#pings = [];
  }
}

/**
 * Milliseconds that pictures take from their sending to their receipt: the age of the one handed to
 * the page, less the mean time since its receipt.
 *
 * `estimatedPlayoutTimestamp` is the sender's NTP time of what is played at `timestamp`, known once
 * RTCP sender reports came (webrtc-stats, RTCInboundRtpStreamStats).
 *
 * @param {object | null} video an "inbound-rtp" report.
 * @param {number | null} processingMs mean from receipt to the decoded picture, lately.
 * @param {number | null} offsetMs of the server's clock.
 * @returns {number | null} null when not known, or when the clocks cannot be right.
 */
export function sendToReceive(video, processingMs, offsetMs) {
  const sentAt = video?.estimatedPlayoutTimestamp;
  if (!Number.isFinite(sentAt) || sentAt === 0) return null;
  if (offsetMs === null || processingMs === null) return null;
  const unix = sentAt > NTP_EPOCH_MS ? sentAt - NTP_EPOCH_MS : sentAt;
  const delay = video.timestamp + offsetMs - unix - processingMs;
  return delay > -100 && delay < 60_000 ? delay : null;
}

/** Where the video's jitter buffer starts: what the sound's needs on a calm machine, in ms. */
export const JITTER_START_MS = 40;
const JITTER_MOST_MS = 200;
const SMALL_OFFSET_MS = 8;
const GAIN = 0.3;

/**
 * The video's next `jitterBufferTarget`. Browsers leave offsets up to about 30 ms alone; this takes
 * them out by holding the picture back as long as the sound is, and never holds the sound.
 *
 * @param {number} targetMs the present target.
 * @param {number | null} avOffsetMs positive when the picture is ahead.
 */
export function nextJitterTarget(targetMs, avOffsetMs) {
  if (avOffsetMs === null || Math.abs(avOffsetMs) < SMALL_OFFSET_MS) return targetMs;
  return Math.round(Math.min(JITTER_MOST_MS, Math.max(0, targetMs + GAIN * avOffsetMs)));
}
