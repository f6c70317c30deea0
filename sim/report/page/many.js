// The page of many runs: a table that sorts, markers of time against memory, and a page for each row.

const PANELS = 12; // more pictures than that nobody compares

function tablePage(table, about, colours) {
  const count = table.ids.length;
  const values = table.values;
  const has = (name) => Object.hasOwn(values, name);
  const label = (row) => table.labels.filter((name) => !table.constant.some(([same]) => same === name))
    .map((name) => valueText(values[name][row])).join(", ") || String(values.policy ? values.policy[row] : table.ids[row]);
  const opened = new Set(about.runs);
  const address = (row) => `#run=${encodeURIComponent(table.ids[row])}`;

  const counts = new Map();
  const state = (row) => (has("status") ? values.status[row]
    : values.fits[row] ? "fits" : values.fits[row] === false ? "does not fit" : "not run");
  for (let row = 0; row < count; row++) counts.set(state(row), (counts.get(state(row)) || 0) + 1);
  const head = el("header", { class: "top" },
    el("p", { class: "kicker" }, table.subtitle),
    el("h1", {}, table.title),
    table.lead ? el("p", { class: "lead" }, table.lead) : null,
    cautions(table.caution),
    table.warnings.map((line) => el("p", { class: "hint" }, glued(line))),
    table.constant.length ? el("p", { class: "lead" }, table.constant.map(([name, value]) => `${words(name)} ${valueText(value)}`).join(" · ")) : null);
  const verdict = table.verdict.length ? card("Verdict", { id: "verdict" }, table.verdict.map((line) => el("p", {}, glued(line)))) : null;
  const tiles = verdict ? null : el("dl", { class: "tiles" }, tile(count === 1 ? "run" : "runs", numberText(count)),
    [...counts].sort(([, a], [, b]) => b - a).map(([name, many]) => tile(words(name), numberText(many), null, many / count)));

  const shown = new Set(table.shown);
  let wanted = "";
  const off = new Set(); // policies that are left out
  const text = (row) => table.labels.map((name) => valueText(values[name][row])).concat(state(row)).join(" ").toLowerCase();
  const every = Array.from({ length: count }, (_, row) => row);
  let texts = null; // of all rows, made when somebody filters
  const chosen = () => {
    const of = off.size ? every.filter((row) => !off.has(String(values.policy[row]))) : every;
    if (!wanted) return of;
    texts = texts || every.map(text);
    return of.filter((row) => wanted.split(/\s+/).every((word) => texts[row].includes(word)));
  };

  const panels = new Map(); // by job: runs of two machines, models, batches or layouts are never in one picture
  const pictures = el("div", { class: "panels" });
  const rest = el("p", { class: "hint", role: "status" });
  const job = (row) => table.facets.map((name) => `${name === "parallel" ? "" : `${words(name)} `}${valueText(values[name][row])}`).join(" · ");
  const tellOf = (row) => [label(row), table.shown.filter((name) => !table.labels.includes(name) && name !== "error" && name !== "fits" && name !== "status")
      .map((name) => column(name)).map(([name, title, kind]) => [title, valueText(values[name][row], kind)]).filter(([, said]) => said !== NONE)];
  const fits = (row) => has("makespan_ns") && has("peak_bytes") && values.fits[row] && values.makespan_ns[row] !== null && values.peak_bytes[row] !== null;
  const isHollow = (row) => has("fidelity") && values.fidelity[row] === "reconstruction";
  const openRow = (row) => { location.hash = address(row); };
  const scatter = () => new Scatter({ tell: tellOf, open: openRow });
  const winners = winnersCard(table, address);
  const overhead = overheadCard(table, job, openRow, tellOf);
  const hasFront = table.verdict.length > 0 || table.facets.length > 0;
  const column = (name) => table.columns.find(([each]) => each === name);
  const holder = el("div");
  const empty = el("p", { class: "hint", role: "status" });
  const found = el("span", { class: "span", role: "status" });
  let sort = null;

  function tableOf(rows) {
    const columns = table.columns.filter(([name]) => shown.has(name));
    columns.sort(([a], [b]) => place(a) - place(b)); // the policy comes first
    return grid({
      caption: "Runs", rows, page: PAGE, sort, rowHeader: 0,
      columns: columns.map(([name, title, kind, hint], number) => ({
        title, kind, down: kind === "bytes" || kind === "time" || kind === "change" ? false : undefined,
        hint: hint || null,
        value: (row) => values[name][row],
        cell: number === 0 || name === "over_fastest" || name === "fits" || name === "error" || name === "status"
          ? (row) => cell(name, kind, row, number === 0) : null,
      })),
    });
  }
  const place = (name) => { const at = table.shown.indexOf(name); return at < 0 ? table.shown.length + table.columns.findIndex(([each]) => each === name) : at; };

  function cell(name, kind, row, first) {
    const value = values[name][row];
    const said = valueText(value, kind);
    if (first) {
      const sign = markerSign(...table.policies[String(value)]);
      return el("a", { href: address(row), class: "nowrap", title: opened.has(table.ids[row]) ? "Open this run" : "All figures" }, sign, said, opened.has(table.ids[row]) ? el("span", { class: "has" }, " ▸ timeline") : null);
    }
    if (name === "over_fastest") return value === 0 ? badge("fastest", "good") : table.same[row] ? `≈ ${said}` : said;
    if (name === "error") return el("span", { class: "clip", title: value || null }, value || "");
    if (name === "fits" || name === "status") {
      const good = value === true || value === "ok";
      return badge(said, good ? "good" : value === "infeasible" || value === false ? "warn" : value === null || value === "not_applicable" || value === "missing" ? "" : "bad");
    }
    return said;
  }

  function refresh(rebuild = false) {
    const rows = chosen();
    found.textContent = rows.length === count ? "" : `${numberText(rows.length)} of ${numberText(count)}`;
    if (rebuild || !holder.firstChild) { shownGrid = tableOf(rows); holder.replaceChildren(shownGrid.root); }
    else shownGrid.show(rows);
    const none = wanted ? "No run matches the filter." : "No policy is chosen.";
    empty.textContent = rows.length ? "" : none;
    if (winners) winners.show(rows, none);
    if (overhead) overhead.show(rows, none);
    drawPanels(rows.filter(fits), rows.length ? "None of the runs that are chosen fits." : none);
    tellAgain(); // the pointer may lie on a picture that is gone
  }

  function drawPanels(fitting, none) {
    const jobs = new Map();
    for (const row of fitting) {
      const name = job(row);
      if (!jobs.has(name)) jobs.set(name, []);
      jobs.get(name).push(row);
    }
    const drawn = [...jobs].slice(0, PANELS);
    rest.textContent = !jobs.size ? none : jobs.size > drawn.length ? `${numberText(jobs.size - drawn.length)} more jobs have runs; the filter below chooses among them.` : "";
    for (const [name] of drawn) {
      if (panels.has(name)) continue;
      const picture = scatter();
      panels.set(name, { picture, root: el("figure", {}, name ? el("figcaption", {}, name) : null, picture.holder) });
    }
    pictures.classList.toggle("several", drawn.length > 1);
    pictures.replaceChildren(...drawn.map(([name]) => panels.get(name).root));
    for (const [name, rows] of drawn) panels.get(name).picture.show(rows.map((row) => point(row, rows.length)), {
      limit: budgetOf(rows), front: hasFront,
    });
  }

  function point(row, beside) {
    const [colour, shape] = table.policies[String(values.policy[row])];
    return { x: values.makespan_ns[row], y: values.peak_bytes[row], colour, shape, row,
      name: beside > NAMED ? "" : table.facets.length ? String(values.policy[row]) : label(row),
      hollow: isHollow(row) };
  }

  function budgetOf(rows) {
    const limits = new Set(has("capacity_bytes") ? rows.map((row) => values.capacity_bytes[row]) : []);
    return limits.size === 1 ? [...limits][0] : null;
  }
  let shownGrid = null;

  const filter = el("input", { type: "search", placeholder: "Filter: gpt2 dtr 60%", "aria-label": "Filter the rows",
    oninput: (event) => { wanted = event.currentTarget.value.trim().toLowerCase(); refresh(); } });
  const picker = el("details", { class: "picker" }, el("summary", {}, "columns"),
    el("div", {}, table.columns.map(([name, title]) => {
      const box = el("input", { type: "checkbox", disabled: name === "policy", onchange: (event) => {
        if (event.currentTarget.checked) shown.add(name); else shown.delete(name);
        refresh(true);
      } });
      box.checked = shown.has(name);
      return el("label", {}, box, title);
    })));
  picker.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !picker.open) return;
    picker.open = false;
    picker.querySelector("summary").focus();
  });
  const policies = Object.entries(table.policies);
  const legend = policies.length < 2 ? null : el("div", { class: "legend toggles", role: "group", "aria-label": "Policies that are shown" },
    policies.map(([name, sign]) => el("button", {
      type: "button", "aria-pressed": "true",
      onclick: (event) => {
        if (!off.delete(name)) off.add(name);
        event.currentTarget.setAttribute("aria-pressed", String(!off.has(name)));
        refresh();
      },
    }, markerSign(...sign), name)));

  const fitting = every.filter(fits);
  const says = [
    fitting.some(isHollow) ? "Hollow: a reconstruction, detail of the published system was not public." : "",
    hasFront ? "Dotted: the runs that no other beats in both time and peak." : "", "A click opens a run."].filter(Boolean).join(" ");
  const picture = fitting.length < 2 ? null // one marker is against nothing
    : card("Time against memory", { hint: says, id: "scatter" }, legend, pictures, rest);
  const runs = card("Runs", { id: "runs", tools: el("div", { class: "tools" }, found, filter, picker) }, holder, empty,
    notesList([
      ...(table.same.some(Boolean) ? [`≈ not distinguishable from the fastest on the same job: within the model's own error of ${percentText(table.model_error)}${table.model_error_on}`] : []),
      ...table.notes]));
  whenShown(runs, () => {
    refresh();
    new ResizeObserver(() => panels.forEach(({ picture, root }) => root.isConnected && picture.draw())).observe(pictures);
    if (overhead) new ResizeObserver(overhead.draw).observe(overhead.holder);
  });
  return [head, verdict || tiles, winners && winners.root, picture, overhead && overhead.root, runs, scopeCard(table.scope), factsCard(table.facts, table.machine_notes), commandCard(table.command)];
}

// All that is known of one row: its figures, and its run where that is in the file.
function rowPage(table, id, run, colours) {
  const row = table.ids.indexOf(id);
  if (row < 0) return [el("nav", { class: "way", "aria-label": "Where this is" }, el("a", { href: "#" }, `‹ ${table.title}`)),
    el("header", { class: "top" }, el("h1", {}, "No such run"), el("p", { class: "lead" }, `This file has no run ${id}.`))];
  const differ = table.labels.filter((name) => !table.constant.some(([same]) => same === name));
  const where = el("nav", { class: "way", "aria-label": "Where this is" }, el("a", { href: "#" }, `‹ ${table.title}`),
    el("span", {}, differ.map((name) => (name === "policy" ? "" : `${words(name)} `) + valueText(table.values[name][row])).join(" · ")));
  if (run) return [where, ...runPage(run, colours)];
  const lines = table.columns.map(([name, title, kind]) => [title, table.values[name][row], kind])
    .filter(([, value]) => value !== null && value !== "" && value !== undefined)
    .map(([title, value, kind]) => [title, kind === "bytes" ? bytesText(value) : kind === "time" ? timeText(value) : valueText(value, kind)]);
  return [where, el("header", { class: "top" }, el("h1", {}, String(table.values.policy ? table.values.policy[row] : id)),
    el("p", { class: "lead" }, "The figures of this run. Its timeline is not in this file."),
    fileLinks(table.links[id] || [])), card("All figures", {}, pairs(lines))];
}
