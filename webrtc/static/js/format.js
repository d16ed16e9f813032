/** Numbers as words for the panel. Every function takes null or NaN for "not known" and says so. */

export const UNKNOWN = "–";

const known = (value) => typeof value === "number" && Number.isFinite(value);
const SIGNED = { signDisplay: "exceptZero", maximumFractionDigits: 0 };
const signed = new Intl.NumberFormat("en", SIGNED);

/** A fixed number of decimals; a minus that rounds to zero is dropped. */
export function decimal(value, digits = 0) {
  if (!known(value)) return UNKNOWN;
  const text = value.toFixed(digits);
  return Number(text) === 0 ? (0).toFixed(digits) : text;
}

/** Milliseconds: one decimal below 10, none above. */
export function milliseconds(value) {
  return known(value) ? `${decimal(value, Math.abs(value) < 9.95 ? 1 : 0)} ms` : UNKNOWN;
}

/** An offset in ms with its sign. */
export function offset(value) {
  return known(value) ? `${signed.format(value).replace("-", "−")} ms` : UNKNOWN;
}

/** Bits per second, in kbit/s or Mbit/s. */
export function bitrate(bitsPerSecond) {
  if (!known(bitsPerSecond)) return UNKNOWN;
  if (bitsPerSecond >= 999_500) return `${decimal(bitsPerSecond / 1e6, 2)} Mbit/s`;
  return `${decimal(bitsPerSecond / 1e3)} kbit/s`;
}

/** A share in [0, 1] as per cent; a share that is not zero never reads as zero. */
export function percent(share) {
  if (!known(share)) return UNKNOWN;
  if (share > 0 && share < 0.0005) return "< 0.1 %";
  return `${decimal(share * 100, 1)} %`;
}

/** Seconds as "0.4 s", "12 s" or "3:05". */
export function seconds(value) {
  if (!known(value)) return UNKNOWN;
  if (value < 9.95) return `${decimal(value, 1)} s`;
  if (value < 59.5) return `${decimal(value)} s`;
  return clock(value);
}

/** Seconds as m:ss, or h:mm:ss from an hour on. */
export function clock(value) {
  if (!known(value)) return UNKNOWN;
  const whole = Math.max(0, Math.round(value));
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const tail = String(s).padStart(2, "0");
  return h ? `${h}:${String(m).padStart(2, "0")}:${tail}` : `${m}:${tail}`;
}

/** A size in bytes, in decimal units. */
export function bytes(value) {
  if (!known(value)) return UNKNOWN;
  if (value < 1e3) return `${value} B`;
  if (value < 1e6) return `${decimal(value / 1e3)} kB`;
  return `${decimal(value / 1e6, 1)} MB`;
}

/** "look_left" as "Look left", "voice2" as "Voice 2". */
export function label(name) {
  const words = String(name)
    .replaceAll("_", " ")
    .replace(/([a-z])(\d)/g, "$1 $2")
    .trim();
  return words.charAt(0).toUpperCase() + words.slice(1);
}

/** A name that is safe for a file: rtgen-ada-2026-01-31-12-00-05.webm. */
export function recordingName(avatar, date, extension) {
  const who = String(avatar ?? "avatar")
    .toLowerCase()
    .replace(/[^a-z0-9]+/g, "-");
  const stamp = date.toISOString().slice(0, 19).replace(/[T:]/g, "-");
  return `rtgen-${who}-${stamp}.${extension}`;
}
