/**
 * From two readings of `RTCPeerConnection.getStats()` to the numbers of the panel. A reading is an
 * array of plain stats objects; counters of WebRTC only rise, so every rate is a difference.
 */

/** The parts of a reading that the panel uses; parts that are missing are null. */
export function snapshot(reports) {
  const list = [...reports];
  const inbound = (kind) => list.find((r) => r.type === "inbound-rtp" && r.kind === kind) ?? null;
  const transport = list.find((r) => r.type === "transport");
  const pairs = list.filter((r) => r.type === "candidate-pair");
  const chosen = pairs.find((r) => r.id === transport?.selectedCandidatePairId);
  const pair = chosen ?? pairs.find((r) => r.nominated && r.state === "succeeded") ?? null;
  const video = inbound("video");
  const local = pair && list.find((r) => r.id === pair.localCandidateId);
  return {
    time: video?.timestamp ?? pair?.timestamp ?? null,
    video,
    audio: inbound("audio"),
    pair,
    codec: list.find((r) => r.id === video?.codecId)?.mimeType?.split("/")[1] ?? null,
    route: local ? `${local.relayProtocol ? "relay " : ""}${local.protocol ?? ""}`.trim() : null,
  };
}

const difference = (now, before, key) => {
  const [a, b] = [now?.[key], before?.[key]];
  return Number.isFinite(a) && Number.isFinite(b) && a >= b ? a - b : null;
};

const ratio = (part, whole, scale = 1) =>
  part !== null && whole !== null && whole > 0 ? (part / whole) * scale : null;

/**
 * Rates between two snapshots.
 *
 * Milliseconds: `jitterBufferVideoMs`, `jitterBufferAudioMs`, `decodeMs`, `processingMs` (means per
 * picture or sample; the last from the receipt of a picture to its decoded form), `roundTripMs`,
 * `avOffsetMs` (positive: the picture is ahead of the sound; from RTCP sender reports, so null for
 * the first seconds). Shares: `loss`, `concealed`. The counters `freezes` and `frozenS` are totals
 * of the connection, `frozenShare` is of its `aliveS` seconds.
 *
 * @param {object | null} before an earlier snapshot of the same connection.
 * @param {object} now a later one.
 * @param {number} aliveS seconds since the first picture.
 */
export function rates(before, now, aliveS) {
  const { video, audio, pair } = now;
  const past = before ?? { time: null, video: null, audio: null };
  const wallS = past.time !== null && now.time > past.time ? (now.time - past.time) / 1000 : null;
  const inVideo = (key) => difference(video, past.video, key);
  const inAudio = (key) => difference(audio, past.audio, key);
  const bytes = sum(inVideo("bytesReceived"), inAudio("bytesReceived"));
  const lost = sum(inVideo("packetsLost"), inAudio("packetsLost"));
  const received = sum(inVideo("packetsReceived"), inAudio("packetsReceived"));
  const buffer = (get) => ratio(get("jitterBufferDelay"), get("jitterBufferEmittedCount"), 1000);
  const frozenS = video?.totalFreezesDuration ?? null;
  return {
    fps: ratio(inVideo("framesDecoded"), wallS),
    dropped: video?.framesDropped ?? null,
    width: video?.frameWidth ?? null,
    height: video?.frameHeight ?? null,
    bitrate: ratio(bytes, wallS, 8),
    loss: ratio(lost, sum(lost, received)),
    concealed: ratio(inAudio("concealedSamples"), inAudio("totalSamplesReceived")),
    jitterBufferVideoMs: buffer(inVideo),
    jitterBufferAudioMs: buffer(inAudio),
    decodeMs: ratio(inVideo("totalDecodeTime"), inVideo("framesDecoded"), 1000),
    processingMs: ratio(inVideo("totalProcessingDelay"), inVideo("framesDecoded"), 1000),
    roundTripMs: pair?.currentRoundTripTime != null ? pair.currentRoundTripTime * 1000 : null,
    avOffsetMs: avOffset(video, audio),
    freezes: video?.freezeCount ?? null,
    frozenS,
    frozenShare: frozenS !== null && aliveS > 0 ? frozenS / aliveS : null,
    codec: now.codec,
    route: now.route,
  };
}

function sum(a, b) {
  return a === null && b === null ? null : (a ?? 0) + (b ?? 0);
}

function avOffset(video, audio) {
  const [seen, heard] = [video?.estimatedPlayoutTimestamp, audio?.estimatedPlayoutTimestamp];
  return Number.isFinite(seen) && Number.isFinite(heard) && seen && heard ? seen - heard : null;
}

/**
 * Milliseconds from a picture's last packet to its display, from the metadata of
 * `requestVideoFrameCallback`; null where the browser does not say.
 */
export function receiveToDisplay({ receiveTime, expectedDisplayTime }) {
  if (!Number.isFinite(receiveTime) || !Number.isFinite(expectedDisplayTime)) return null;
  return Math.max(0, expectedDisplayTime - receiveTime);
}
