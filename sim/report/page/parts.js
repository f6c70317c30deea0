// Parts that pages of one run and of many share.

function card(title, { hint = null, tools = null, id = null } = {}, ...children) {
  return el("section", { class: "card", id, "aria-label": title },
    el("header", {}, el("div", {}, el("h2", {}, title), hint ? el("p", { class: "hint" }, hint) : null), tools), ...children);
}

function tile(name, value, note = null, share = null) {
  const bar = share === null ? null : el("span", { class: "meter", "aria-hidden": "true" }, el("span"));
  if (bar) bar.firstChild.style.width = `${Math.min(100, Math.max(0, 100 * share))}%`;
  return el("div", { class: "tile" }, el("dt", {}, name), el("dd", {}, el("b", {}, value), bar, note ? el("small", {}, note) : null));
}

// A bar of parts side by side, and below it what each is. parts: [name, value, colour, hatched].
function partsBar(parts, write, label) {
  const whole = parts.reduce((sum, [, value]) => sum + value, 0);
  if (!whole) return el("p", { class: "hint" }, "nothing to show");
  const some = parts.filter(([, value]) => value > 0);
  const bar = el("div", { class: "parts", role: "img", "aria-label": `${label}: ${some.map(([name, value]) => `${name} ${percentText(value / whole)}`).join(", ")}` },
    some.map(([name, value, colour, hatched]) => {
      const piece = el("span", { class: hatched ? "hatched" : null, title: `${name}: ${write(value)}` });
      piece.style.setProperty("--colour", colour);
      piece.style.flexGrow = value / whole;
      return piece;
    }));
  return el("div", {}, bar, el("ul", { class: "legend" }, some.map(([name, value, colour, hatched]) =>
    el("li", {}, swatch(colour, hatched), el("span", {}, name), el("b", {}, write(value)), el("small", {}, percentText(value / whole))))));
}

function pairs(lines) {
  return el("dl", { class: "pairs" }, lines.map(([name, text]) => el("div", {},
    el("dt", { class: name.startsWith(" ") ? "inner" : null }, unbroken(name.trim())), el("dd", {}, glued(text)))));
}

function scopeCard(scope, more = []) {
  return card("What is included, what is left out", {},
    ...more.map((line) => el("p", {}, line)),
    el("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": "What is included and left out" }, el("table", { class: "prose" },
      el("thead", {}, el("tr", {}, ["", "included", "left out"].map((text) => el("th", { scope: "col" }, text)))),
      el("tbody", {}, scope.map(([about, has, lacks]) => el("tr", {}, el("th", { scope: "row" }, about), el("td", {}, has), el("td", {}, lacks)))))));
}

function factsCard(facts, notes) {
  const assumed = facts.filter(([, , , standing]) => standing === "assumed").length;
  const several = new Set(facts.map(([profile]) => profile)).size > 1;
  const columns = [
    ...(several ? [{ title: "profile", value: ([profile]) => profile }] : []),
    { title: "figure", value: (fact) => fact[1], cell: (fact) => coded(fact[1]) },
    { title: "value", value: (fact) => fact[2], sorts: false, cell: (fact) => el("span", { class: "nowrap" }, typed(fact[2])) },
    { title: "standing", value: (fact) => fact[3], cell: (fact) => el("span", { class: `standing ${fact[3] === "assumed" ? "assumed" : ""}` }, fact[3]) },
    { title: "source", value: (fact) => fact[4], cell: (fact) => el("span", { class: "source" }, typed(fact[4])) },
  ];
  const hint = !facts.length ? "The machine was given without sources."
    : assumed ? `${assumed} of ${facts.length} ${assumed === 1 ? "is" : "are"} assumed, neither measured nor published: vary them before you believe what rests on them.`
      : `None of ${facts.length} is merely assumed.`;
  return card("Figures of the machine", { hint, id: "facts" },
    facts.length ? grid({ columns, rows: facts, caption: "Figures of the machine", page: 20, rowHeader: several ? 1 : 0 }).root : null,
    notesList(notes));
}

// What else is to be known of a result.
function notesCard(notes) {
  return notes.length ? card("Notes", { id: "notes" }, notesList(notes)) : null;
}

// Notes as they are written for a terminal, where names stand between backticks.
function notesList(notes) {
  return notes.length ? el("ul", { class: "notes" }, notes.map((note) => el("li", {}, note.split(/`([^`\n]+)`/).flatMap((part, i) => (i % 2 ? [coded(part)] : glued(typed(part))))))) : null;
}

function commandCard(command) {
  return command ? card("Reproduce", {}, el("pre", { class: "command", tabindex: "0" }, el("code", {}, command.split(/(?<= )/).map((word) => el("span", {}, word))))) : null;
}

function badge(text, kind = "") {
  return el("span", { class: `badge ${kind}` }, text);
}

// What a reader must know before any figure: what was not run for this page, and why.
function cautions(lines) {
  return lines.length ? el("ul", { class: "caution" }, lines.map((line) => el("li", {}, badge("from what was saved", "warn"), ` ${line}`))) : null;
}

// Files that lie beside the page.
function fileLinks(links) {
  return links.length ? el("p", { class: "hint files" }, "kept beside: ", links.map(([text, address]) => el("a", { href: address }, text))) : null;
}
