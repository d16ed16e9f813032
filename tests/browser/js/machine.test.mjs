import assert from "node:assert/strict";
import { test } from "node:test";
import * as machine from "../../../webrtc/static/js/machine.js";

/** Feeds events one after the other; returns the last state and all effects. */
function run(events, state = machine.INITIAL) {
  const effects = [];
  for (const event of events) {
    const [after, more] = machine.next(state, { now: 0, ...event });
    state = after;
    effects.push(...more);
  }
  return { state, effects };
}

const FULL = { kind: "full" };
const BROKEN = { kind: "unreachable" };
const READY = [{ type: "configured" }];
const LIVE = [
  ...READY,
  { type: "start" },
  { type: "answered", location: "/sessions/a", resumeToken: "r1" },
  { type: "playing" },
];

test("a session that works goes from loading to live and is deleted at its end", () => {
  assert.equal(run(LIVE).state.phase, "live");
  const { state, effects } = run([...LIVE, { type: "end" }]);
  assert.equal(state.phase, "idle");
  assert.deepEqual(effects, [
    { type: "open", resumeToken: null },
    { type: "close", location: "/sessions/a" },
  ]);
  assert.equal(state.resumeToken, null);
});

test("a server that wants a token locks the page until one is given", () => {
  const { state } = run([{ type: "configured", locked: true }]);
  assert.equal(state.phase, "locked");
  assert.equal(state.problem.kind, "token_needed");
  assert.equal(run([{ type: "start" }], state).state.phase, "locked");
  assert.equal(run([{ type: "unlock" }], state).state.phase, "idle");
});

test("a refused token locks the page again", () => {
  const problem = { kind: "unauthorized" };
  const { state } = run([...READY, { type: "start" }, { type: "rejected", problem }]);
  assert.equal(state.phase, "locked");
  assert.equal(state.problem, problem);
});

test("a full server is asked again exactly when it said", () => {
  const refused = { type: "refused", problem: FULL, retryAfterS: 5, now: 1_000 };
  const { state } = run([...READY, { type: "start", now: 1_000 }, refused]);
  assert.equal(state.phase, "waiting");
  assert.equal(machine.secondsLeft(state, 1_000), 5);
  assert.equal(machine.secondsLeft(state, 5_900), 1);
  assert.equal(run([{ type: "tick", now: 5_999 }], state).state.phase, "waiting");
  const later = run([{ type: "tick", now: 6_000 }], state);
  assert.equal(later.state.phase, "connecting");
  assert.deepEqual(later.effects, [{ type: "open", resumeToken: null }]);
});

test("a server that stays full is given up after ten minutes", () => {
  let { state } = run([...READY, { type: "start", now: 0 }]);
  let now = 0;
  while (state.phase !== "failed") {
    const refused = { type: "refused", problem: FULL, retryAfterS: 30, now };
    ({ state } = run([refused, { type: "tick", now: now + 30_000 }], state));
    now += 30_000;
    assert.ok(now < 2 * machine.WAIT_LIMIT_MS, "never gave up");
  }
  assert.equal(state.problem.kind, "gave_up");
  assert.ok(now > machine.WAIT_LIMIT_MS);
});

test("a lost link is resumed with its token, and not deleted", () => {
  const lost = { type: "lost", problem: BROKEN, now: 10_000 };
  const { state, effects } = run([...LIVE, lost]);
  assert.equal(state.phase, "reconnecting");
  assert.deepEqual(effects.at(-1), { type: "close", location: null });
  const again = run([{ type: "tick", now: 10_000 + machine.backoff(0) }], state);
  assert.deepEqual(again.effects, [{ type: "open", resumeToken: "r1" }]);
});

test("waits between tries grow, and a picture resets them", () => {
  let { state } = run(LIVE);
  let now = 0;
  const waits = [];
  for (let i = 0; i < 4; i += 1) {
    ({ state } = run([{ type: "lost", problem: BROKEN, now }], state));
    waits.push(state.retryAt - now);
    now = state.retryAt;
    ({ state } = run([{ type: "tick", now }], state));
  }
  assert.deepEqual(
    waits,
    [...waits].sort((a, b) => a - b),
  );
  assert.ok(waits[3] > waits[0]);
  ({ state } = run([{ type: "playing" }, { type: "lost", problem: BROKEN, now }], state));
  assert.equal(state.retryAt - now, machine.backoff(0));
});

test("a link that stays broken is given up after a minute", () => {
  let { state } = run(LIVE);
  let now = 0;
  while (state.phase !== "failed") {
    ({ state } = run([{ type: "lost", problem: BROKEN, now }], state));
    now = state.retryAt ?? now;
    ({ state } = run([{ type: "tick", now }], state));
    assert.ok(now < 2 * machine.RECONNECT_LIMIT_MS, "never gave up");
  }
  assert.equal(state.problem, BROKEN);
});

test("a session that is gone is replaced by a new one at once", () => {
  const lost = { type: "lost", problem: BROKEN, now: 0 };
  const { state, effects } = run([
    ...LIVE,
    lost,
    { type: "tick", now: machine.backoff(0) },
    { type: "gone", now: 400 },
  ]);
  assert.equal(state.phase, "connecting");
  assert.deepEqual(effects.at(-1), { type: "open", resumeToken: null });
});

test("gone without a resume token is no event: it cannot loop", () => {
  const { state, effects } = run([...READY, { type: "start" }, { type: "gone" }]);
  assert.equal(state.phase, "connecting");
  assert.equal(effects.length, 1);
});

test("an offer without a picture is tried again after its limit", () => {
  const { state } = run([...READY, { type: "start", now: 0 }]);
  const limit = machine.CONNECT_LIMIT_MS;
  assert.equal(run([{ type: "tick", now: limit }], state).state.phase, "connecting");
  const late = run([{ type: "tick", now: limit + 1 }], state).state;
  assert.equal(late.phase, "reconnecting");
  assert.equal(late.problem.kind, "no_media");
});

test("a session ended by the server is not deleted: it may live on in another tab", () => {
  const { state, effects } = run([...LIVE, { type: "fatal", problem: { kind: "replaced" } }]);
  assert.equal(state.phase, "failed");
  assert.deepEqual(effects.at(-1), { type: "close", location: null });
});

test("late answers of a session that was ended change nothing", () => {
  const { state } = run([...LIVE, { type: "end" }]);
  for (const event of [
    { type: "playing" },
    { type: "answered", location: "/x", resumeToken: "y" },
    { type: "lost", problem: BROKEN },
    { type: "refused", problem: FULL, retryAfterS: 1 },
    { type: "rejected", problem: FULL },
    { type: "fatal", problem: FULL },
    { type: "end" },
  ]) {
    assert.deepEqual(machine.next(state, { now: 9, ...event }), [state, []]);
  }
});

test("a server that cannot be reached at first is asked again by itself", () => {
  const { state } = run([{ type: "config_failed", problem: BROKEN, now: 0 }]);
  assert.equal(state.phase, "loading");
  const { effects } = run([{ type: "tick", now: state.retryAt }], state);
  assert.deepEqual(effects, [{ type: "load" }]);
});

test("states are never changed in place", () => {
  const { state } = run(LIVE);
  const copy = structuredClone(state);
  machine.next(Object.freeze(state), { type: "lost", problem: BROKEN, now: 1 });
  assert.deepEqual(state, copy);
});

test("an unknown event is a bug and says so", () => {
  assert.throws(() => machine.next(machine.INITIAL, { type: "lots", now: 0 }), /lots/);
});

/** Whether a machine, walked at random, ever holds a plan to retry in a phase that shows none. */
function findsStrayRetry(next) {
  const events = ["configured", "start", "playing", "lost", "refused", "end", "tick", "retry_now"];
  let seed = 7;
  let state = machine.INITIAL;
  for (let now = 0; now < 400_000; now += 200) {
    seed = (seed * 1_103_515_245 + 12_345) % 2 ** 31;
    const type = events[(seed >> 8) % events.length];
    [state] = next(state, { type, now, problem: BROKEN, retryAfterS: 2 });
    const planned = ["waiting", "reconnecting", "loading"].includes(state.phase);
    if (state.retryAt !== null && !planned) return true;
  }
  return false;
}

test("no walk leaves a retry planned outside the phases that show it", () => {
  assert.equal(findsStrayRetry(machine.next), false);
});

test("the walk finds a machine that keeps the plan after a picture", () => {
  const planted = (state, event) => {
    const [after, effects] = machine.next(state, event);
    return event.type === "lost" && after.phase === "reconnecting"
      ? [{ ...after, phase: "live" }, effects]
      : [after, effects];
  };
  assert.equal(findsStrayRetry(planted), true);
});
