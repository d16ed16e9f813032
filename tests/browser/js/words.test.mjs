import assert from "node:assert/strict";
import { test } from "node:test";
import { action, HELP, KEYS } from "../../../webrtc/static/js/keys.js";
import { INITIAL } from "../../../webrtc/static/js/machine.js";
import * as problems from "../../../webrtc/static/js/problems.js";
import * as words from "../../../webrtc/static/js/words.js";

test("every notice has a title, whole sentences and a known tone", () => {
  for (const kind of words.KINDS) {
    const { tone, title, body, action: button } = words.notice({ kind, left: 3, limit: 10 });
    assert.ok(["info", "warn", "error"].includes(tone), kind);
    assert.ok(title.length > 5 && !/undefined|null|NaN/.test(title + body), `${kind}: ${body}`);
    assert.match(body, /[.…]$/, kind);
    if (button) assert.ok(button.id && button.label, kind);
  }
});

test("a kind without words of its own is shown as it came", () => {
  assert.match(words.notice({ kind: "moon_phase" }).body, /moon_phase/);
  assert.match(words.notice({ kind: "moon_phase", detail: "It is full." }).body, /It is full/);
});

test("plain HTTP is told the address it came from", () => {
  assert.match(words.notice({ kind: "insecure", host: "10.0.0.7:8080" }).body, /http:\/\/10.0.0.7/);
});

test("the countdown shows beside the words of a full server", () => {
  const state = { ...INITIAL, phase: "waiting", problem: { kind: "full" }, retryAt: 1 };
  assert.match(words.connectionNotice(state, 4).countdown, /in 4 s/);
  assert.equal(words.connectionNotice(state, 0).countdown, "Trying …");
  const { body } = words.connectionNotice(state, 4);
  assert.equal(body, words.connectionNotice(state, 3).body);
});

test("a broken link is being mended until it is given up", () => {
  const state = { ...INITIAL, phase: "reconnecting", attempt: 2, problem: { kind: "lost" } };
  assert.match(words.connectionNotice(state, 1).body, /Getting your session back/);
  const trying = words.connectionNotice({ ...state, phase: "connecting" }, null);
  assert.equal(trying.countdown, "Trying …");
  const failed = words.connectionNotice({ ...state, phase: "failed" }, null);
  assert.match(failed.body, /did not come back/);
  assert.equal(failed.countdown, "");
  assert.equal(words.connectionNotice({ ...state, problem: null }, null), null);
});

test("errors of getUserMedia become advice", () => {
  assert.equal(words.microphoneProblem({ name: "NotAllowedError" }), "mic_denied");
  assert.equal(words.microphoneProblem({ name: "NotFoundError" }), "mic_missing");
  assert.equal(words.microphoneProblem({ name: "NotReadableError" }), "mic_busy");
});

test("the status word follows the face only while live", () => {
  const live = { ...INITIAL, phase: "live" };
  const face = { state: "listening", speaking: false };
  assert.equal(words.status(live, face), "Listening");
  assert.equal(words.status(live, { ...face, speaking: true }), "Speaking");
  assert.equal(words.status({ ...INITIAL, phase: "waiting" }, face), "Waiting");
});

test("answers of the server become problems by their reason, then by their status", () => {
  const body = { reason: "not_ready", detail: "Warming up." };
  assert.deepEqual(problems.fromAnswer(503, "3", body), {
    kind: "not_ready",
    detail: "Warming up.",
    retryAfterS: 3,
  });
  assert.equal(problems.fromAnswer(503, null, null).kind, "full");
  assert.equal(problems.fromAnswer(413, null, {}).kind, "too_large");
  assert.equal(problems.fromAnswer(500, null, null).kind, "failed");
  assert.equal(problems.fromAnswer(418, null, null).kind, "invalid");
});

test("an absurd Retry-After neither hammers nor waits for hours", () => {
  assert.equal(problems.retrySeconds("86400"), 60);
  assert.equal(problems.retrySeconds("Wed, 21 Oct 2026 07:28:00 GMT"), 2);
  assert.equal(problems.retrySeconds(null), 2);
  assert.equal(problems.retrySeconds("-1"), 2);
});

test("each way an offer can fail has its event", () => {
  const type = (kind) => problems.offerEvent({ kind, retryAfterS: 1 }, 0).type;
  assert.deepEqual(
    ["full", "not_ready", "draining", "not_found", "unreachable", "invalid"].map(type),
    ["refused", "refused", "refused", "gone", "lost", "rejected"],
  );
});

test("a problem survives being thrown, and any other error keeps its words", () => {
  const trouble = new problems.Trouble({ kind: "busy" });
  assert.equal(problems.fromError(trouble), trouble.problem);
  assert.equal(problems.fromError(new TypeError("x is not a function")).kind, "failed");
  assert.match(problems.fromError(new TypeError("odd")).detail, /odd/);
});

test("the server's ending is told with its reason", () => {
  assert.deepEqual(problems.fromEnding("replaced"), { kind: "replaced" });
  assert.equal(problems.fromEnding("failed: no model").detail, "no model");
});

const ON = { enabled: true, dialogOpen: false, gestures: 6 };

test("single keys act on the page but never while text is entered", () => {
  assert.equal(action({ key: "m" }, ON), "mic");
  assert.equal(action({ key: "M" }, ON), "mic");
  assert.equal(action({ key: "m", target: { tagName: "TEXTAREA" } }, ON), null);
  assert.equal(action({ key: "m", target: { tagName: "INPUT", type: "password" } }, ON), null);
  assert.equal(action({ key: "m", target: { tagName: "INPUT", type: "radio" } }, ON), "mic");
  assert.equal(action({ key: "r", ctrlKey: true }, ON), null);
  assert.equal(action({ key: "m" }, { ...ON, enabled: false }), null);
  assert.equal(action({ key: "constructor" }, ON), null);
});

test("Escape stops from everywhere but an open dialog", () => {
  assert.equal(action({ key: "Escape", target: { tagName: "TEXTAREA" } }, ON), "stop");
  assert.equal(action({ key: "Escape" }, { ...ON, enabled: false }), "stop");
  assert.equal(action({ key: "Escape" }, { ...ON, dialogOpen: true }), null);
});

test("digits are gestures as far as there are any", () => {
  assert.equal(action({ key: "1" }, ON), "gesture:0");
  assert.equal(action({ key: "6" }, ON), "gesture:5");
  assert.equal(action({ key: "7" }, ON), null);
});

test("the help names every key", () => {
  const listed = HELP.map(([key]) => key.toLowerCase());
  for (const key of Object.keys(KEYS)) assert.ok(key === "escape" || listed.includes(key), key);
});
