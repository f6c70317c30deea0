// Figures as text, and elements whose content is text.

const NONE = "–";
const BYTES = [[1e15, "PB"], [1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];
const TIMES = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];

const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 12 });

// A whole number of parts, a half to the even one, as the tables round: 22,555 ns are 22.56 µs, and 22,545 ns 22.54.
// Both are whole, so that a half is told from what lies beside it.
function halfEven(value, part) {
  const count = value / part;
  const below = Math.floor(count);
  if (count - below !== 0.5) return Math.round(count);
  return below % 2 ? below + 1 : below;
}

// A value to so many digits. exact, unit: the whole number that it is of so many, where it is one.
function digits(value, count, exact = null, unit = 1) {
  if (value === 0) return "0";
  const whole = Math.floor(Math.log10(Math.abs(value))) + 1;
  const places = Math.max(0, Math.min(12, count - whole));
  const text = (exact === null ? value : halfEven(exact, unit / 10 ** places) / 10 ** places).toFixed(places);
  const short = text.includes(".") ? text.replace(/\.?0+$/, "") : text;
  return Math.abs(value) < 1000 ? short : grouped.format(Number(short));
}

function inUnit(value, units, count) {
  const size = Math.abs(value);
  let at = units.findIndex(([one]) => size >= one);
  if (at < 0) at = units.length - 1;
  // 999.96 MB to four digits is 1 GB
  if (at > 0 && Number((size / units[at][0]).toPrecision(count)) >= 1000) at -= 1;
  const [unit, name] = units[at];
  return `${digits(value / unit, count, Number.isInteger(value) ? value : null, unit)} ${name}`;
}

const bytesText = (value, count = 4) => inUnit(value, BYTES, count);
const timeText = (value, count = 4) => inUnit(value, TIMES, count);

function percentText(fraction, sign = false) {
  const value = 100 * fraction;
  const text = value.toFixed(Math.abs(value) < 9.95 ? 1 : 0);
  return `${sign && value > 0 && Number(text) ? "+" : ""}${Number(text) === 0 ? "0" : text} %`;
}

function numberText(value) {
  if (Number.isInteger(value)) return grouped.format(value);
  return Math.abs(value) < 1000 ? digits(value, 4) : grouped.format(Math.round(value));
}

function valueText(value, kind) {
  if (value === null || value === undefined || value === "") return NONE;
  if (kind === "bytes") return bytesText(value, 3);
  if (kind === "time") return timeText(value, 3);
  if (kind === "percent") return percentText(value);
  if (kind === "change") return percentText(value, true);
  if (typeof value === "boolean") return value ? "yes" : "no";
  return typeof value === "number" ? numberText(value) : String(value);
}

// An element. Attributes beginning with "on" are listeners; children are elements or text, never markup.
function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

const UNIT = /(\d[\d.,]* (?:%|[kMGTP]?B|[nµum]?s)(?![\w/]))/;

// A text of a profile, where microseconds are "us", as the page writes it.
const typed = (text) => String(text).replace(/(?<=\d) us\b/g, " µs");

// A text whose numbers are not parted from their units at the end of a line.
const glued = (text) => text.split(UNIT).map((part, i) => (i % 2 ? el("span", { class: "nowrap" }, part) : part));

// A name as code, which breaks after its points and underscores alone.
const coded = (name) => el("code", {}, name.split(/(?<=[._])/).flatMap((part, i) => (i ? [el("wbr"), part] : [part])));

// A short name, such as a link's, which a line does not end within.
const unbroken = (name) => (name.length <= SHORT && !name.includes(" ") ? el("span", { class: "nowrap" }, name) : name);
const SHORT = 24;

function swatch(colour, hatched = false) {
  const made = el("span", { class: hatched ? "swatch hatched" : "swatch", "aria-hidden": "true" });
  made.style.setProperty("--colour", colour);
  return made;
}

const words = (name) => name.replaceAll("_", " ");
const ink = () => getComputedStyle(document.documentElement).getPropertyValue("--ink").trim();
const shade = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
