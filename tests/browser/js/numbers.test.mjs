import assert from "node:assert/strict";
import { test } from "node:test";
import * as format from "../../../webrtc/static/js/format.js";
import { rates, receiveToDisplay, snapshot } from "../../../webrtc/static/js/rates.js";
import * as readout from "../../../webrtc/static/js/readout.js";
import { loudness, percentile, Samples, SilenceMeter } from "../../../webrtc/static/js/samples.js";
import { nextJitterTarget, sendToReceive, ServerClock } from "../../../webrtc/static/js/timing.js";

test("numbers that are not known read as a dash, never as NaN", () => {
  for (const show of [
    format.decimal,
    format.milliseconds,
    format.offset,
    format.bitrate,
    format.percent,
    format.seconds,
    format.clock,
    format.bytes,
  ]) {
    for (const value of [null, undefined, NaN, Infinity]) {
      assert.equal(show(value), format.UNKNOWN, show.name);
    }
  }
});

test("numbers carry their units and as many digits as they deserve", () => {
  assert.equal(format.milliseconds(3.14), "3.1 ms");
  assert.equal(format.milliseconds(9.96), "10 ms");
  assert.equal(format.milliseconds(-0.01), "0.0 ms");
  assert.equal(format.offset(12.4), "+12 ms");
  assert.equal(format.offset(-12.4), "−12 ms");
  assert.equal(format.offset(0.2), "0 ms");
  assert.equal(format.bitrate(512_345), "512 kbit/s");
  assert.equal(format.bitrate(999_600), "1.00 Mbit/s");
  assert.equal(format.percent(0), "0.0 %");
  assert.equal(format.percent(0.0001), "< 0.1 %");
  assert.equal(format.seconds(7.04), "7.0 s");
  assert.equal(format.seconds(187), "3:07");
  assert.equal(format.clock(3_661), "1:01:01");
  assert.equal(format.clock(59.7), "1:00");
  assert.equal(format.bytes(999), "999 B");
  assert.equal(format.bytes(2_340_000), "2.3 MB");
  assert.equal(format.label("look_left"), "Look left");
  assert.equal(format.label("voice2"), "Voice 2");
});

test("a recording's name is safe for a file", () => {
  const date = new Date(Date.UTC(2026, 0, 31, 12, 0, 5));
  assert.equal(
    format.recordingName("Ada/../x", date, "mp4"),
    "rtgen-ada-x-2026-01-31-12-00-05.mp4",
  );
  assert.match(format.recordingName(null, date, "webm"), /^rtgen-avatar-/);
});

const reading = (time, video, audio = {}, pair = {}) => [
  { type: "codec", id: "c", mimeType: "video/H264" },
  { type: "transport", id: "t", selectedCandidatePairId: "p" },
  { type: "candidate-pair", id: "q", nominated: true, state: "succeeded" },
  { type: "candidate-pair", id: "p", timestamp: time, localCandidateId: "l", ...pair },
  { type: "local-candidate", id: "l", protocol: "udp" },
  { type: "inbound-rtp", kind: "video", timestamp: time, codecId: "c", ...video },
  { type: "inbound-rtp", kind: "audio", timestamp: time, ...audio },
];

test("rates are differences over the time between two readings", () => {
  const a = snapshot(
    reading(
      1_000,
      {
        framesDecoded: 100,
        bytesReceived: 0,
        packetsReceived: 90,
        packetsLost: 10,
        jitterBufferDelay: 1,
        jitterBufferEmittedCount: 100,
        totalDecodeTime: 1,
      },
      { bytesReceived: 500, packetsReceived: 0, packetsLost: 0 },
    ),
  );
  const b = snapshot(
    reading(
      3_000,
      {
        framesDecoded: 150,
        bytesReceived: 100_000,
        packetsReceived: 180,
        packetsLost: 20,
        jitterBufferDelay: 3,
        jitterBufferEmittedCount: 150,
        totalDecodeTime: 1.1,
        estimatedPlayoutTimestamp: 5_030,
        freezeCount: 1,
        totalFreezesDuration: 0.5,
        frameWidth: 256,
        frameHeight: 256,
      },
      {
        bytesReceived: 25_500,
        packetsReceived: 100,
        packetsLost: 0,
        estimatedPlayoutTimestamp: 5_000,
      },
      { currentRoundTripTime: 0.002 },
    ),
  );
  const r = rates(a, b, 10);
  assert.equal(r.fps, 25);
  assert.equal(r.bitrate, 500_000);
  assert.equal(r.loss, 10 / 200);
  assert.equal(r.jitterBufferVideoMs, 40);
  assert.ok(Math.abs(r.decodeMs - 2) < 1e-9);
  assert.equal(r.avOffsetMs, 30);
  assert.equal(r.roundTripMs, 2);
  assert.equal(r.frozenShare, 0.05);
  assert.equal(r.codec, "H264");
  assert.equal(r.route, "udp");
});

test("the first reading gives no rates, an empty one nothing at all", () => {
  const first = rates(null, snapshot(reading(1_000, { framesDecoded: 5 })), 0);
  assert.equal(first.fps, null);
  const none = rates(null, snapshot([]), 0);
  assert.ok(Object.values(none).every((value) => value === null));
});

test("counters that went back, as after a reconnection, give no negative rate", () => {
  const a = snapshot(reading(1_000, { framesDecoded: 900 }));
  const b = snapshot(reading(2_000, { framesDecoded: 20 }));
  assert.equal(rates(a, b, 1).fps, null);
});

/** The nearest-rank percentile by its definition: the least value with enough others below it. */
function slowPercentile(values, q) {
  const enough = (v) => values.filter((w) => w <= v).length >= (q / 100) * values.length;
  return Math.min(...values.filter(enough));
}

test("percentiles equal their definition", () => {
  for (let n = 1; n < 40; n += 1) {
    const values = Array.from({ length: n }, (_, i) => (i * 7_919) % 101);
    for (const q of [1, 25, 50, 95, 99, 100]) {
      assert.equal(percentile(values, q), slowPercentile(values, q), `${n} values, q ${q}`);
    }
  }
  assert.equal(percentile([], 50), null);
});

test("the definition finds a percentile that is one rank too high", () => {
  const planted = (values, q) => {
    const sorted = [...values].sort((a, b) => a - b);
    return sorted[Math.min(sorted.length - 1, Math.floor((q / 100) * sorted.length))];
  };
  const values = [1, 2, 3, 4];
  assert.notEqual(planted(values, 50), slowPercentile(values, 50));
});

test("samples forget what is too old or too many", () => {
  const samples = new Samples(100, 3);
  for (const now of [0, 50, 120, 130, 140]) samples.add(now, now);
  assert.deepEqual(samples.values(), [120, 130, 140]);
  samples.add(240, NaN);
  samples.add(241, 7);
  assert.deepEqual(samples.values(), [7]);
});

test("silence counts from its first quiet reading, and only if there was sound", () => {
  const run = (levels) => {
    const meter = new SilenceMeter(1_000, { floor: 0.01, holdMs: 30, limitMs: 500 });
    for (let i = 0; i < 100; i += 1) {
      const result = meter.read(1_000 + 10 * i, levels[Math.min(i, levels.length - 1)]);
      if (result !== undefined) return result;
    }
    return undefined;
  };
  assert.equal(run([0.2, 0.2, 0.2, 0]), 30);
  assert.equal(run([0.2, 0, 0.2, 0.2, 0]), 40);
  assert.equal(run([0]), null);
  assert.equal(run([0.2]), null);
});

test("loudness is the root of the mean square", () => {
  assert.equal(loudness([3, -3, 3, -3]), 3);
  assert.equal(loudness([]), 0);
});

test("the server's clock comes from the quickest ping", () => {
  const clock = new ServerClock();
  assert.equal(clock.offsetMs, null);
  clock.add(0, 100, 5_090); // slow: 40 ms off
  clock.add(1_000, 1_004, 6_002);
  clock.add(2_000, 2_080, 7_000);
  assert.equal(clock.offsetMs, 5_000);
  assert.equal(clock.roundTripMs, 80);
});

test("a server that tells no time gives a round trip and no clock", () => {
  const clock = new ServerClock();
  clock.add(0, 10, undefined);
  assert.equal(clock.roundTripMs, 10);
  assert.equal(clock.offsetMs, null);
});

test("the way of pictures is what is left of their age", () => {
  const ntp = 2_208_988_800_000;
  const video = { timestamp: 1_000_100, estimatedPlayoutTimestamp: ntp + 1_000_500 };
  assert.equal(sendToReceive(video, 40, 500), 60);
  assert.equal(sendToReceive(video, 40, null), null);
  assert.equal(sendToReceive({ timestamp: 1 }, 40, 0), null);
  assert.equal(sendToReceive({ ...video, estimatedPlayoutTimestamp: 1 }, 40, 1e6), null);
});

test("time from receipt to display is never negative and may be unknown", () => {
  assert.equal(receiveToDisplay({ receiveTime: 10, expectedDisplayTime: 45 }), 35);
  assert.equal(receiveToDisplay({ receiveTime: 10, expectedDisplayTime: 9 }), 0);
  assert.equal(receiveToDisplay({ expectedDisplayTime: 9 }), null);
});

test("steering the video's buffer brings the picture to the sound", () => {
  const heard = 75; // what the sound is held
  let target = 40;
  for (let i = 0; i < 30; i += 1) target = nextJitterTarget(target, heard - target);
  assert.ok(Math.abs(heard - target) <= 10, `ended at ${target}`);
  assert.equal(nextJitterTarget(40, null), 40);
  assert.equal(nextJitterTarget(190, 500), 200);
  assert.equal(nextJitterTarget(10, -500), 0);
});

test("steering with the wrong sign would run away", () => {
  let target = 40;
  for (let i = 0; i < 30; i += 1) target = nextJitterTarget(target, target - 75);
  assert.ok(Math.abs(75 - target) > 10);
});

test("the panel says in step within 45 ms and who leads beyond", () => {
  const more = (avOffsetMs) =>
    readout.tiles({ rates: { avOffsetMs }, latency: { p50: null, p95: null } }).av.more;
  assert.equal(more(45), "in step");
  assert.equal(more(46), "picture ahead");
  assert.equal(more(-46), "sound ahead");
  assert.equal(more(null), "");
});

test("rows are text even before anything was measured", () => {
  const nothing = { rates: null, receiveToDisplay: { p50: null, p95: null } };
  const rows = [
    ...readout.browserRows(nothing),
    ...readout.serverRows({ stats: null, media: null }),
  ];
  for (const row of rows) {
    assert.equal(row.length, 3);
    assert.ok(
      row.every((cell) => typeof cell === "string"),
      row[0],
    );
    assert.doesNotMatch(row.join(), /NaN|undefined|null/);
  }
});

test("stages are shown against the time there is", () => {
  const rows = readout.stageRows({
    stages: { denoise: { p50: 80, p95: 200, max: 300 } },
    encode: { p50: 4, p95: 8 },
    unitMs: 160,
    frameMs: 40,
  });
  assert.deepEqual(rows[0], { name: "Denoise", p50: "80.0", p95: "200.0", half: 0.5, most: 1 });
  assert.equal(rows[1].half, 0.1);
});

test("a sparkline ends at the right and stays in its box", () => {
  const points = readout.sparkline([1, null, 3, 2], 4).split(" ");
  assert.equal(points.length, 3);
  assert.equal(points.at(-1).split(",")[0], "100.0");
  for (const point of points) {
    const y = Number(point.split(",")[1]);
    assert.ok(y >= 0 && y <= 24, point);
  }
  assert.equal(readout.sparkline([null, 4], 4), "");
});
