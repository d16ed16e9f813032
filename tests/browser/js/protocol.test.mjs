import assert from "node:assert/strict";
import { test } from "node:test";
import * as protocol from "../../../webrtc/static/js/protocol.js";
import { freshToken, RESUME_LIMIT_MS } from "../../../webrtc/static/js/storage.js";

test("every message that the page sends carries version and type", () => {
  const messages = [
    protocol.speak("hello"),
    protocol.stop(),
    protocol.setState("thinking"),
    protocol.triggerEvent("nod"),
    protocol.setAvatar("ada"),
    protocol.setQuality(2),
    protocol.microphone(true),
    protocol.ping(1.5),
  ];
  for (const message of messages) assert.equal(message.version, protocol.VERSION);
  assert.equal(new Set(messages.map(({ type }) => type)).size, messages.length);
});

test("a message of another version or shape is an error", () => {
  const read = (body) => () => protocol.parse(JSON.stringify(body));
  const good = { version: 1, type: "finished", generation: 0, position_s: 1, interrupted: false };
  assert.deepEqual(read(good)(), good);
  assert.throws(read({ ...good, version: 2 }), /version/);
  assert.throws(read({ ...good, interrupted: "no" }), /interrupted/);
  assert.throws(read([good]), /object/);
  assert.throws(() => protocol.parse("{"));
});

test("types that a newer server adds are passed on", () => {
  assert.equal(protocol.parse('{"version": 1, "type": "weather"}').type, "weather");
});

test("the face speaks between started and finished", () => {
  let face = protocol.face(protocol.SILENT, { type: "started" });
  assert.equal(face.speaking, true);
  face = protocol.face(face, { type: "set_state", state: "listening" });
  assert.deepEqual([face.speaking, face.state], [true, "listening"]);
  face = protocol.face(face, { type: "finished", interrupted: true });
  assert.deepEqual([face.speaking, face.interrupted], [false, true]);
});

test("a resume token is of use for a few seconds only", () => {
  const entry = { token: "t", at: 1_000 };
  assert.equal(freshToken(entry, 1_000 + RESUME_LIMIT_MS), "t");
  assert.equal(freshToken(entry, 1_001 + RESUME_LIMIT_MS), null);
  assert.equal(freshToken(entry, 999), null);
});
