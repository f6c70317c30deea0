// The page of one run.

function runPage(run, colours) {
  const f = run.figures;
  const lanes = unpackLanes(run.lanes);
  const whole = f.makespan_ns * (f.devices || 1);
  const stall = Object.values(f.stall_ns || {}).reduce((sum, ns) => sum + ns, 0);
  const moved = Object.values(f.moved_bytes || {}).reduce((sum, bytes) => sum + bytes, 0);
  const share = (ns) => (whole ? ns / whole : 0);
  const summed = f.devices > 1 ? ` in ${numberText(f.devices)} devices` : "";
  const assumed = run.facts.filter((fact) => fact[3] === "assumed").length;

  const refused = f.refusal ? refusalOf(run) : null;
  const head = el("header", { class: "top" },
    el("p", { class: "kicker" }, run.platform),
    el("h1", {}, run.title),
    run.workload ? el("p", { class: "lead" }, run.workload) : null,
    el("p", { class: "badges" },
      run.complete || refused ? badge(f.fits ? "fits" : "does not fit", f.fits ? "good" : "bad") : badge("did not end", "bad"),
      run.fidelity[0] ? el("span", { title: run.fidelity[1] }, badge(run.fidelity[0])) : null,
      run.manages.length ? badge(`manages ${run.manages.map(words).join(", ")}`) : null,
      assumed ? el("a", { href: "#facts", class: "badge warn", onclick: goTo }, `${assumed} assumed ${assumed === 1 ? "figure" : "figures"}`) : null),
    cautions(run.caution),
    el("p", { class: "hint" }, run.memory),
    (run.warnings || []).map((line) => el("p", { class: "hint" }, glued(line))),
    fileLinks(run.links));

  const tiles = el("dl", { class: "tiles" },
    refused ? tile("ran until", run.end ? timeText(f.makespan_ns) : "its start", refused.short ? "then memory was short" : words(f.refusal))
      : tile("time of an iteration", timeText(f.makespan_ns), f.overhead === null || f.overhead === undefined ? null : `${percentText(f.overhead, true)} against unlimited memory`),
    tile("peak memory", bytesText(f.peak_bytes), `of ${bytesText(f.capacity_bytes)}`, f.peak_bytes / f.capacity_bytes),
    tile("stalled", percentText(share(stall)), stall ? timeText(stall) + summed : "never", share(stall)),
    tile("recomputing", percentText(share(f.recompute_ns)), f.recompute_ns ? timeText(f.recompute_ns) + summed : "nothing", share(f.recompute_ns)),
    tile("moved", bytesText(moved), f.overlap === null || f.overlap === undefined ? "nothing" : `${percentText(f.overlap)} of its time hidden`),
    f.tokens_per_s ? tile("tokens per second", numberText(Math.round(f.tokens_per_s)), f.mfu ? `MFU ${percentText(f.mfu)}` : null)
      : f.samples_per_s ? tile("samples per second", digits(f.samples_per_s, 4)) : null);

  const time = run.end === 0 ? null : card("Where the time goes", { hint: f.devices > 1 ? `Main engines of ${f.devices} devices together.` : null },
    partsBar([
      ["computing", f.compute_ns, colours.whys.run],
      ["recomputing", f.recompute_ns, colours.whys.recompute],
      ["encoding and decoding", f.codec_ns, colours.whys.codec],
      ...Object.entries(f.stall_ns || {}).map(([cause, ns]) => [`stall: ${cause}`, ns, colours.whys.stall, true]),
      ["idle", f.idle_ns, "#9aa0a6"],
    ], (ns) => timeText(ns, 3), "Where the time goes"));

  const timeline = timelinePart(run, lanes, colours, refused);
  return [head, refused ? card("Why it does not fit", { id: "refusal" }, refused.lines.map((line) => el("p", {}, glued(line)))) : null, tiles, el("div", { class: timeline.root ? "watch" : null }, timeline.root, timeline.alive, time), stallCard(run), trafficCard(run),
    card("All figures", {}, pairs(known(run.summary, refused))),
    run.doc ? card("What the policy does", { hint: run.fidelity[1] ? `Fidelity ${run.fidelity[0]}: ${run.fidelity[1]}.` : null }, el("pre", { class: "doc", tabindex: "0" }, run.doc.split(/`([^`\n]+)`/).map((part, i) => (i % 2 ? el("code", {}, part) : part)))) : null,
    scopeCard(run.scope, [refused ? "One iteration, until it did not fit." : `One iteration, ${run.steady ? "the steady state" : "the first one, not the steady state"}${run.warm_up ? ` after ${run.warm_up} for warm-up` : ""}.`]),
    notesCard(run.beside || []), factsCard(run.facts, run.notes), commandCard(run.command)];
}

// The lines of a summary that have something to say, without those that the card above has said.
function known(lines, refused) {
  return lines.filter(([name, text]) => text !== NONE && !(refused && name === "error"));
}

// Why a run did not fit: the request that memory was too short for, and the message.
// tier: where; short: the request, {bytes, free}, null where it was not for bytes.
function refusalOf(run) {
  const f = run.figures;
  if (!f.full || !f.full.length) return { tier: null, short: null, lines: [f.error] };
  const [tier] = f.full;
  const short = { bytes: f.need_bytes, free: f.free_bytes };
  const when = run.end ? `After ${timeText(run.end)}` : "Before the first op ran";
  const lines = [`${when} ${bytesText(short.bytes)} more were asked for in ${tier}, and ${bytesText(short.free)} were free.`, f.error];
  return { tier, short, lines };
}

// Memory and lanes over one span of time, and what is held at a moment of it.
// refused: why the run did not fit, null for one that ended.
function timelinePart(run, lanes, colours, refused = null) {
  const view = new Viewport(run.end);
  const names = [...run.roles, "workspace"];
  const used = run.tiers.filter((tier) => tier.time.length);
  const tiers = new Map();
  const unpacked = (tier) => {
    if (!tiers.has(tier.name)) tiers.set(tier.name, unpackTier(tier, run.tensors, run.roles));
    return tiers.get(tier.name);
  };
  const fullest = used.filter((each) => each.home).reduce((most, each) => (most && most.peak.bytes >= each.peak.bytes ? most : each), null);
  let tier = used.find((each) => refused && each.name === refused.tier) || fullest || used[0] || null;
  const picked = el("p", { class: "picked hint" });
  const alive = alivePart(run, names, colours, picked, () => chart.pick(null));
  if (run.end === 0) { // nothing lies along an axis of time
    if (tier) alive.show(unpacked(tier), unpacked(tier).time.length, null, false, refused !== null);
    return { root: null, alive: tier ? alive.root : null };
  }
  const shortOf = (each) => (refused && each.name === refused.tier ? refused.short : null);
  const chart = new MemoryChart(view, names, colours.roles, {
    onPick: (time, announce) => {
      alive.show(unpacked(tier), atOrBefore(unpacked(tier).time, time) + 1, time, announce);
      chart.pick(time);
      if (!announce) picked.scrollIntoView({ block: "nearest" });
    } });
  const rows = new Lanes(view, run, lanes, colours);

  const legend = el("div", { class: "legend toggles", role: "group", "aria-label": "Roles that are shown" });
  const limit = el("p", { class: "hint limit" });
  const choices = el("div", { class: "choices", role: "group", "aria-label": "Tier" });
  function choose(next) {
    tier = next;
    for (const button of choices.children) button.setAttribute("aria-pressed", button.dataset.tier === tier.name);
    const full = unpacked(tier);
    const { peak } = full;
    const short = shortOf(tier);
    chart.show(full, short);
    limit.replaceChildren(
      el("b", {}, peak.bytes ? `▼ peak ${bytesText(peak.bytes)}` : "nothing was held"),
      peak.bytes ? ` at ${timeText(peak.time)}${peak.op ? `, ${peak.op}` : ""}` : "",
      short ? el("b", { class: "short" }, ` × ${bytesText(short.bytes)} more asked for at the end`) : "",
      el("span", { class: "right" }, `${chart.limitShown ? "┄ " : ""}${tier.limit} ${bytesText(tier.capacity)}` +
        (tier.nominal === tier.capacity ? "" : ` (nominal ${bytesText(tier.nominal)})`) + (chart.limitShown ? "" : ", above this figure")));
    legend.replaceChildren(...[...chart.roles].reverse().map((role) => {
      const name = names[role];
      return el("button", {
        type: "button", "aria-pressed": String(!chart.hidden.has(name)),
        onclick: (event) => {
          if (!chart.hidden.delete(name)) chart.hidden.add(name);
          event.currentTarget.setAttribute("aria-pressed", String(!chart.hidden.has(name)));
          view.redraw();
        },
      }, swatch(colours.roles[name]), words(name));
    }));
    alive.show(full, short ? full.time.length : peak.at + 1, null, false, short !== null);
    chart.pick(null);
    tellAgain();
  }
  choices.append(...used.map((each) => el("button", { type: "button", "data-tier": each.name, onclick: () => choose(each) }, each.name)));

  const span = el("span", { class: "span", "aria-live": "off" });
  const tools = el("div", { class: "tools" }, span,
    el("button", { type: "button", "aria-label": "Zoom out", title: "Zoom out (−)", onclick: () => view.zoom(2) }, "−"),
    el("button", { type: "button", "aria-label": "Zoom in", title: "Zoom in (+)", onclick: () => view.zoom(0.5) }, "+"),
    el("button", { type: "button", title: "Show all (0)", onclick: () => view.all() }, "all"));
  const whys = [...new Set(lanes.why)].sort((a, b) => a - b).map((code) => run.whys[code]);
  const root = card("Timeline", {
    hint: "Drag to zoom, double-click for all; click the memory to see what is held then.", tools, id: "timeline" },
  tier ? el("div", { class: "bar" }, used.length > 1 ? choices : null, legend) : null,
  tier ? limit : null, tier ? chart.holder : null, tier ? picked : null, rows.holder,
  el("ul", { class: "legend whys" }, whys.map((why) => el("li", {}, swatch(colours.whys[why], why === "stall"), why))), rows.said);
  view.drawers.push(() => {
    span.textContent = view.span >= view.full ? timeText(view.full) : `${timeText(view.span, 3)} of ${timeText(view.full)}`;
    root.dataset.start = view.start;
    root.dataset.end = view.end;
    root.dataset.drawn = Number(root.dataset.drawn || 0) + 1;
  });
  whenShown(root, () => {
    if (tier) choose(tier); // which draws the chart
    for (const draw of view.drawers) if (draw !== chart.redraw) draw();
    let width = root.clientWidth;
    new ResizeObserver(() => {
      if (root.clientWidth === width) return;
      width = root.clientWidth;
      view.redraw();
    }).observe(root);
    darkness.addEventListener("change", () => view.redraw());
  });
  return { root, alive: alive.root };
}

// The tensors that a tier holds after some of its changes.
// picked: a line that names the largest of a chosen moment where the list lies below; unpick(): that moment is left.
function alivePart(run, names, colours, picked, unpick) {
  const title = el("h2", {}, "Alive at the peak");
  const hint = el("p", { class: "hint", role: "status" });
  const back = el("button", { type: "button", class: "back", hidden: true }, "back to the peak");
  let atEnd = false; // whether memory was short at the end, so that it shows that moment first
  const bar = el("div");
  const phases = el("p", { class: "hint" });
  const role = (row) => (row.tensor < 0 ? names.length - 1 : run.tensors.role[row.tensor]);
  const table = grid({
    caption: "Tensors that are held",
    page: 12,
    sort: { column: 1, down: true },
    rows: [],
    columns: [
      { title: "tensor", value: (row) => (row.tensor < 0 ? "(workspace)" : run.tensors.name[row.tensor]), cell: (row) => coded(row.tensor < 0 ? "(workspace)" : run.tensors.name[row.tensor]) },
      { title: "bytes", kind: "bytes", value: (row) => row.bytes, cell: (row) => bytesText(row.bytes) },
      { title: "share", kind: "percent", value: (row) => row.share },
      { title: "role", value: (row) => words(names[role(row)]), cell: (row) => el("span", { class: "nowrap" }, swatch(colours.roles[names[role(row)]]), words(names[role(row)])) },
      { title: "layer", kind: "number", down: false, value: (row) => (row.tensor < 0 || run.tensors.layer[row.tensor] < 0 ? null : run.tensors.layer[row.tensor]) },
    ],
  });
  const root = el("section", { class: "card alive", "aria-label": "Tensors that are held" },
    el("header", {}, el("div", {}, title, hint), back), bar, phases, table.root);
  function show(tier, upto, time, announce = false, short = atEnd) {
    atEnd = short;
    const held = holders(tier, upto, run.tensors);
    const total = held.reduce((sum, [, bytes]) => sum + bytes, 0);
    title.textContent = time !== null ? `Alive at ${timeText(time, 5)}` : short ? "Alive when it did not fit" : "Alive at the peak";
    hint.textContent = `${bytesText(total)} in ${tier.name}, ${numberText(held.length)} ${held.length === 1 ? "holder" : "holders"}` +
      (time === null && tier.peak.op && !short ? `, as ${tier.peak.op} ran` : "");
    back.hidden = time === null;
    back.textContent = short ? "back to the end" : "back to the peak";
    back.onclick = () => {
      show(tier, short ? tier.time.length : tier.peak.at + 1, null);
      unpick();
    };
    const rows = held.map(([tensor, bytes]) => ({ tensor, bytes, share: bytes / total }));
    const sums = names.map(() => 0);
    for (const row of rows) sums[role(row)] += row.bytes;
    bar.replaceChildren(partsBar(Object.keys(colours.roles).map((name) => [words(name), sums[names.indexOf(name)] || 0, colours.roles[name]]),
      (bytes) => bytesText(bytes, 3), "By role"));
    phases.textContent = time === null && Object.keys(tier.peak.by_phase).length > 1
      ? `Peak within each phase: ${Object.entries(tier.peak.by_phase).map(([phase, bytes]) => `${phase} ${bytesText(bytes)}`).join(", ")}.` : "";
    if (time === null && tier.peak.reserved !== null) phases.textContent += ` Reserved by its allocator: ${bytesText(tier.peak.reserved)}.`;
    table.show(rows);
    const largest = [...rows].sort((a, b) => b.bytes - a.bytes).slice(0, 3);
    picked.replaceChildren(...(time === null ? [] : [...glued(`${timeText(time, 5)}: ${bytesText(total)} held`), largest.length ? ", most by " : "",
      ...largest.flatMap((row, i) => [i ? ", " : "", coded(row.tensor < 0 ? "(workspace)" : run.tensors.name[row.tensor]), ...glued(` ${bytesText(row.bytes, 3)}`)])]));
    if (announce) root.scrollIntoView({ block: "nearest" });
  }
  return { root, show };
}

function stallCard(run) {
  const f = run.figures;
  const whole = f.makespan_ns * (f.devices || 1);
  const causes = Object.entries(f.stall_ns || {});
  if (!causes.length) return null; // the tile says that no device ever waited
  const meaning = Object.fromEntries(run.causes);
  return card("Stalls by cause", { hint: "What the devices waited for, and which ops waited longest.", id: "stalls" },
    grid({
      caption: "Stalls by cause", rows: causes, sort: { column: 1, down: true },
      columns: [
        { title: "cause", value: ([cause]) => cause },
        { title: "time", kind: "time", value: ([, ns]) => ns, cell: ([, ns]) => timeText(ns) },
        { title: "share", kind: "percent", hint: "of the devices' time", value: ([, ns]) => (whole ? ns / whole : 0) },
        { title: "waits for", value: ([cause]) => meaning[cause] || "" },
      ],
    }).root,
    el("h3", {}, "By op"),
    grid({
      caption: "Stalls by op", rows: run.stalls, sort: { column: 2, down: true }, page: 10,
      columns: [
        { title: "op", value: ([op]) => op, cell: ([op]) => coded(op || "(end of the run)") },
        { title: "cause", value: ([, cause]) => cause },
        { title: "time", kind: "time", value: ([, , ns]) => ns, cell: ([, , ns]) => timeText(ns) },
        { title: "stalls", kind: "number", value: ([, , , count]) => count },
      ],
    }).root);
}

function trafficCard(run) {
  const rows = run.traffic.filter(([, bytes]) => bytes);
  if (!rows.length) return null;
  const unused = run.traffic.length - rows.length;
  const hint = unused ? `${numberText(unused)} other ${unused === 1 ? "link" : "links"} carried nothing.` : null;
  return card("Links", { hint, id: "links" }, grid({
    caption: "What crossed each link", rows, page: 20,
    columns: [
      { title: "link", value: ([link]) => link },
      { title: "bytes", kind: "bytes", value: (link) => link[1], cell: (link) => bytesText(link[1]) },
      { title: "transfers", kind: "number", value: (link) => link[2] },
      { title: "busy", kind: "time", value: (link) => link[3], cell: (link) => timeText(link[3]) },
      { title: "of the run", kind: "percent", value: (link) => link[4] },
      { title: "utilisation", kind: "percent", hint: "bytes over what it could have carried", value: (link) => link[5] },
    ],
  }).root);
}
