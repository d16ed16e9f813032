import assert from "node:assert/strict";
import { readdirSync } from "node:fs";
import { test } from "node:test";

const FOLDER = new URL("../../../webrtc/static/js/", import.meta.url);
const names = readdirSync(FOLDER).filter((name) => name.endsWith(".js"));

test("every module but the first loads without a page, and its imports exist", async () => {
  assert.ok(names.length > 15);
  for (const name of names.filter((one) => one !== "main.js")) {
    const module = await import(new URL(name, FOLDER));
    assert.ok(Object.keys(module).length > 0, name);
  }
});
