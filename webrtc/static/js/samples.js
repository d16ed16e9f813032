/** Measured values over a sliding time, and detectors that work on them. */

/** Values of the last `spanMs` milliseconds, at most `limit` of them; the oldest make room. */
export class Samples {
  #items = [];

  constructor(spanMs, limit = 2_000) {
    this.spanMs = spanMs;
    this.limit = limit;
  }

  get size() {
    return this.#items.length;
  }

  add(now, value) {
    if (!Number.isFinite(value)) return;
    this.#items.push([now, value]);
    let stale = Math.max(0, this.#items.length - this.limit);
    while (stale < this.#items.length && this.#items[stale][0] < now - this.spanMs) stale += 1;
    if (stale) this.#items.splice(0, stale);
  }

  values() {
    return this.#items.map(([, value]) => value);
  }

  /** The nearest-rank percentile, q in [0, 100]; null of no samples. */
  percentile(q) {
    return percentile(this.values(), q);
  }

  clear() {
    this.#items = [];
  }
}

/** Nearest-rank percentile of numbers in any order; null of an empty list. */
export function percentile(values, q) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  const rank = Math.ceil((q / 100) * sorted.length) - 1;
  return sorted[Math.min(sorted.length - 1, Math.max(0, rank))];
}

/** Root mean square of samples in [-1, 1]. */
export function loudness(samples) {
  let sum = 0;
  for (const value of samples) sum += value * value;
  return samples.length ? Math.sqrt(sum / samples.length) : 0;
}

/**
 * Finds when a sound fell silent after a stop: the start of the first stretch of `holdMs` that
 * stays under `floor`.
 */
export class SilenceMeter {
  #since = null;
  #heard = false;

  /** Starts at `now` (ms); `loud` says whether sound was heard just before. */
  constructor(now, { floor = 0.004, holdMs = 150, limitMs = 5_000 } = {}) {
    this.start = now;
    this.floor = floor;
    this.holdMs = holdMs;
    this.limitMs = limitMs;
  }

  /**
   * Takes one reading.
   *
   * @returns {number | null | undefined} ms from the start to silence; null if nothing was heard
   *   since, or it never fell silent; undefined while not decided.
   */
  read(now, level) {
    if (level > this.floor) {
      this.#heard = true;
      this.#since = null;
    } else if (this.#since === null) {
      this.#since = now;
    }
    if (this.#since !== null && now - this.#since >= this.holdMs) {
      return this.#heard ? this.#since - this.start : null;
    }
    return now - this.start > this.limitMs ? null : undefined;
  }
}
