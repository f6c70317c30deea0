// What a study shows beside the runs: who wins where, and what a smaller budget costs; one panel for each other job.

const ACROSS = 8; // columns of a map; an axis of more values goes down
const DOWN = 24; // lines of a map

const isNumber = (value) => typeof value === "number";

// Which axes of the jobs the map of winners lies along: [columns, rows], of those that differ.
function mapAxes(table) {
  const many = (name) => new Set(table.values[name].map((value) => valueText(value))).size;
  const differ = table.labels.filter((name) => !table.constant.some(([same]) => same === name)
    && name !== "policy" && !name.startsWith("policy.") && !["seed", "iterations", "recompute_limit"].includes(name));
  const first = ["budget", "batch", "sequence"].filter((name) => differ.includes(name));
  const order = [...first, ...differ.filter((name) => !first.includes(name) && name !== "model" && name !== "profile"),
    ...["model", "profile"].filter((name) => differ.includes(name))];
  const [one = null, two = null, ...rest] = order;
  if (one !== null && many(one) > ACROSS && (two === null || many(two) < many(one))) return [two, one, rest];
  return [one, two, rest];
}

// Texts of values by size where all begin with numbers, else as they came.
function inOrder(texts) {
  const unique = [...new Set(texts)];
  return unique.every((text) => /^\d/.test(text)) ? unique.sort(collator.compare) : unique;
}

// By panel, column and row the fastest run that fits, and how many others can't be told from it.
function winnersOf(table, rows, [columns, lines, rest]) {
  const { values } = table;
  const said = (name, row) => (name ? valueText(values[name][row]) : "");
  const panels = new Map();
  for (const row of rows) {
    const name = rest.map((axis) => `${words(axis)} ${said(axis, row)}`).join(" · ");
    if (!panels.has(name)) panels.set(name, new Map());
    const cells = panels.get(name);
    const key = JSON.stringify([said(columns, row), said(lines, row)]);
    if (!cells.has(key)) cells.set(key, { all: 0, misfits: 0, fitting: [] });
    const cell = cells.get(key);
    cell.all += 1;
    cell.misfits += values.fits[row] === false;
    if (values.fits[row] && isNumber(values.makespan_ns[row])) cell.fitting.push(row);
  }
  for (const cells of panels.values()) {
    for (const cell of cells.values()) {
      const least = Math.min(...cell.fitting.map((row) => values.makespan_ns[row]));
      cell.best = cell.fitting.reduce((best, row) => (best === null || values.makespan_ns[row] < values.makespan_ns[best]
        || (values.makespan_ns[row] === values.makespan_ns[best] && table.rank[row] < table.rank[best]) ? row : best), null);
      const near = new Set(cell.fitting.filter((row) => values.makespan_ns[row] <= least * (1 + table.model_error)).map((row) => String(values.policy[row])));
      cell.near = Math.max(0, near.size - 1);
    }
  }
  return panels;
}

// The card of winners; null where there is one job or one policy. show(rows) draws it for these rows.
function winnersCard(table, address) {
  const axes = mapAxes(table);
  const [columns, lines, rest] = axes;
  const { values } = table;
  if ((!columns && !lines) || Object.keys(table.policies).length < 2 || !values.makespan_ns || !values.fits) return null;
  const holder = el("div", { class: "maps" });
  const more = el("p", { class: "hint", role: "status" });
  const all = winnersOf(table, table.ids.map((_, row) => row), axes);
  // rows: those chosen; none: what to say where that leaves nothing
  function show(rows, none) {
    if (!rows.length) {
      holder.replaceChildren();
      more.textContent = none;
      return;
    }
    const panels = [...winnersOf(table, rows, axes)];
    let cut = panels.length > PANELS;
    holder.replaceChildren(...panels.slice(0, PANELS).map(([name, cells]) => {
      const keys = [...cells.keys()].map((key) => JSON.parse(key));
      const [allHeads, allSides] = [inOrder(keys.map(([column]) => column)), inOrder(keys.map(([, line]) => line))];
      const [heads, sides] = [allHeads.slice(0, DOWN), allSides.slice(0, DOWN)];
      cut = cut || heads.length < allHeads.length || sides.length < allSides.length;
      const caption = `Fastest policy by ${[columns, lines].filter(Boolean).map(words).join(" and ")}${name ? `, ${name}` : ""}`;
      const body = sides.map((side) => el("tr", {}, lines ? el("th", { scope: "row" }, `${words(lines)} ${side}`) : null,
        heads.map((head) => {
          const place = JSON.stringify([head, side]);
          return el("td", {}, square(cells.get(place), all.get(name).get(place)));
        })));
      return el("figure", {}, name ? el("figcaption", {}, name) : null,
        el("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": caption }, el("table", { class: "map" },
          el("caption", { class: "unseen" }, caption),
          el("thead", {}, el("tr", {}, lines ? el("td", {}) : null, heads.map((head) => el("th", { scope: "col" }, columns ? `${words(columns)} ${head}` : "fastest")))),
          el("tbody", {}, body))));
    }));
    more.textContent = cut ? "There are more jobs than are shown; the filter below chooses among them." : "";
  }
  // cell: of the runs that are chosen; whole: of all
  function square(cell, whole) {
    if (!cell) return el("span", { class: "hint" }, NONE);
    if (cell.best === null) {
      const chosen = whole.best === null ? "nothing" : "none of those chosen";
      return el("span", { class: "hint" }, cell.misfits ? `${chosen} fits` : `${chosen} ran`);
    }
    const over = values.overhead ? values.overhead[cell.best] : null;
    const policy = String(values.policy[cell.best]);
    return el("span", {}, el("a", { href: address(cell.best), class: "nowrap" }, markerSign(...table.policies[policy]), policy),
      el("small", {}, [timeText(values.makespan_ns[cell.best], 3), isNumber(over) ? percentText(over, true) : null,
        cell.near ? `≈ ${cell.near} more` : null,
        values["counters.moves_cancelled"] && values["counters.moves_cancelled"][cell.best] ? "moves cancelled" : null].filter(Boolean).join(" · ")));
  }
  const hint = `The fastest policy that fits, its time, and that over unlimited memory. ≈: policies that can't be told from it, within the model's own error of ${percentText(table.model_error)}.`;
  return { root: card("Who wins where", { hint, id: "winners" }, holder, more), show };
}

// The budgets of a job's runs as parts of what everything kept takes; those above limit nothing and are one point.
function shareOf(values, row) {
  const [budget, whole] = [values.budget_bytes[row], values.unconstrained_peak_bytes[row]];
  return isNumber(budget) && isNumber(whole) && whole > 0 ? Math.min(1, budget / whole) : null;
}

// The card of time added over the budget; null where the budget does not differ. show(rows) draws it for these rows.
function overheadCard(table, job, opens, tell) {
  const { values } = table;
  const has = (name) => Object.hasOwn(values, name);
  if (!["overhead", "budget_bytes", "unconstrained_peak_bytes"].every(has)) return null;
  const budgets = new Map(); // by job: where there is one, nothing lies along the axis
  table.ids.forEach((_, row) => {
    const share = shareOf(values, row);
    if (share !== null) budgets.set(job(row), (budgets.get(job(row)) || new Set()).add(share.toFixed(3)));
  });
  const drawable = (row) => budgets.get(job(row)).size > 1;
  if (![...budgets.values()].some((shares) => shares.size > 1)) return null;
  const holder = el("div", { class: "panels" });
  const more = el("p", { class: "hint", role: "status" });
  const panels = new Map();
  function show(rows, none) {
    const jobs = new Map();
    for (const row of rows) {
      const share = shareOf(values, row);
      const fits = values.fits[row] && isNumber(values.overhead[row]);
      if (share === null || !drawable(row) || (!fits && values.fits[row] !== false)) continue;
      const name = job(row);
      if (!jobs.has(name)) jobs.set(name, []);
      const [colour, shape] = table.policies[String(values.policy[row])];
      jobs.get(name).push({ x: share, y: fits ? values.overhead[row] : null, colour, shape, row, policy: String(values.policy[row]),
        hollow: has("fidelity") && values.fidelity[row] === "reconstruction" });
    }
    for (const [name, points] of jobs) if (points.every((point) => point.y === null)) jobs.delete(name); // crosses alone
    const drawn = [...jobs].slice(0, PANELS);
    more.textContent = !jobs.size ? (rows.length ? "None of the runs that are chosen fits." : none) : jobs.size > drawn.length ? `${numberText(jobs.size - drawn.length)} more jobs; the filter below chooses among them.` : "";
    holder.classList.toggle("several", drawn.length > 1);
    for (const [name] of drawn) {
      if (panels.has(name)) continue;
      const curves = new Curves({ tell, open: opens });
      panels.set(name, { curves, root: el("figure", {}, name ? el("figcaption", {}, name) : null, curves.holder) });
    }
    holder.replaceChildren(...drawn.map(([name]) => panels.get(name).root));
    for (const [name, points] of drawn) panels.get(name).curves.show(points);
  }
  const hint = "Time over that with unlimited memory, against the budget as a part of what everything kept takes. A cross: the policy does not fit.";
  const draw = () => panels.forEach(({ curves, root }) => root.isConnected && curves.draw());
  const legend = el("ul", { class: "legend" }, Object.entries(table.policies).map(([name, sign]) => el("li", {}, markerSign(...sign), name)));
  return { root: card("Time added over the budget", { hint, id: "overhead" }, legend, holder, more), show, holder, draw };
}

// Time added over the budget: a line per policy, a cross below where it does not fit.
class Curves extends Scatter {
  constructor(how) {
    super(how);
    this.canvas.setAttribute("aria-label", "Time added over the budget, a line per policy; the table below has the same figures.");
  }

  show(points) {
    this.points = points;
    this.draw();
  }

  draw() {
    const { context, width, height } = this.begin();
    const misfits = [...new Set(this.points.filter((p) => p.y === null).map((p) => p.policy))].sort(collator.compare);
    const fitting = this.points.filter((p) => p.y !== null);
    const [right, top, step] = [16, 12, 9];
    const foot = misfits.length ? Math.min(misfits.length, 8) * step + 8 : 0; // crosses have a strip of their own
    const bottom = 48;
    const h = height - top - bottom - foot;
    const ys = percentScale([0, ...fitting.map((p) => p.y)], h / 50);
    const left = Math.ceil(Math.max(38, ...ys.texts.map((said) => context.measureText(said).width))) + 30;
    const w = width - left - right;
    const xs = percentScale(this.points.map((p) => p.x), w / 60);
    this.axes(context, { left, top, w, h, foot, height, width }, xs, ys, "budget, of the peak of everything kept", "time added");
    this.places = this.points.map((point) => [left + xs.at(point.x) * w, point.y === null
      ? top + h + 8 + step * (misfits.indexOf(point.policy) % 8) + step / 2 : top + h - ys.at(point.y) * h]);
    const lines = new Map();
    this.points.forEach((point, i) => {
      if (point.y === null) return;
      if (!lines.has(point.policy)) lines.set(point.policy, []);
      lines.get(point.policy).push(i);
    });
    context.lineWidth = 1.4;
    for (const line of lines.values()) {
      line.sort((a, b) => this.points[a].x - this.points[b].x);
      context.strokeStyle = policyInk(this.points[line[0]].colour);
      context.beginPath();
      line.forEach((i, n) => context[n ? "lineTo" : "moveTo"](...this.places[i]));
      context.stroke();
    }
    this.points.forEach((point, i) => {
      const [x, y] = this.places[i];
      context.strokeStyle = policyInk(point.colour);
      context.lineWidth = 1.6;
      if (point.y === null) {
        context.beginPath();
        for (const side of [-1, 1]) {
          context.moveTo(x - 3, y - 3 * side);
          context.lineTo(x + 3, y + 3 * side);
        }
        context.stroke();
        return;
      }
      marker(context, point.shape, x, y, 4.2);
      context.fillStyle = point.hollow ? shade("--card") : policyInk(point.colour);
      context.fill();
      context.stroke();
    });
    tellAgain();
  }
}

// A scale of fractions in percent.
function percentScale(values, room) {
  let [low, high] = values.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [Infinity, -Infinity]);
  if (high - low < LEAST) [low, high] = [low - LEAST, high + LEAST];
  const spare = 0.06 * (high - low);
  const [start, end] = [low - spare, high + spare];
  const { step, found } = ticks(start, end, room);
  const places = Math.max(0, Math.min(9, -Math.floor(Math.log10(100 * step) + 1e-9)));
  return { at: (value) => (value - start) / (end - start), ticks: found, texts: found.map((value) => `${(100 * value + 0).toFixed(places)} %`) };
}
