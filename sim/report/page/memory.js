// Memory over time of one tier, stacked by role, with its capacity and its peak. Drawn by uPlot.

// Positions of the points that draw a step curve as all would: the first, lowest, highest and last of each column.
function thin(times, totals, start, end, columns) {
  const low = Math.max(0, atOrBefore(times, start));
  const high = after(times, end, low, times.length);
  if (high - low <= 4 * columns) return { low, high, kept: null };
  const kept = [];
  const width = (end - start) / columns;
  for (let i = low; i < high; ) {
    const column = Math.floor((times[i] - start) / width);
    let [least, most] = [i, i];
    let last = i;
    for (; last < high && Math.floor((times[last] - start) / width) === column; last++) {
      if (totals[last] < totals[least]) least = last;
      if (totals[last] > totals[most]) most = last;
    }
    const four = [i, least, most, last - 1].sort((a, b) => a - b);
    four.forEach((at, n) => { if (n === 0 || at !== four[n - 1]) kept.push(at); });
    i = last;
  }
  return { low, high, kept };
}

class MemoryChart {
  // names: of the roles and of scratch space; colours: by name; hidden: names that are left out.
  constructor(view, names, colours, { onPick }) {
    this.view = view;
    this.names = names;
    this.colours = colours;
    this.hidden = new Set();
    this.stack = Object.keys(colours).map((name) => names.indexOf(name)).filter((role) => role >= 0);
    this.holder = el("div", { class: "memory" });
    this.onPick = onPick;
    this.picked = null;
    this.plot = null;
    this.redraw = () => this.draw();
    view.drawers.push(this.redraw);
  }

  // short: the request at the end that did not fit, {bytes, free}; null where all did.
  show(tier, short = null) {
    this.tier = tier;
    this.roles = this.stack.filter((role) => tier.present[role]);
    const last = tier.totals.length ? tier.totals[tier.totals.length - 1] : 0;
    this.asked = short ? { from: last, to: last + short.bytes } : null;
    let top = Math.max(tier.peak.bytes, this.asked ? this.asked.to : 0, 1);
    this.limitShown = tier.capacity <= 3 * top;
    if (this.limitShown) top = Math.max(top, tier.capacity);
    this.top = top * 1.08;
    this.build();
  }

  build() {
    if (this.plot) this.plot.destroy();
    this.gutter = gutter(this.holder);
    const { view } = this;
    // drawn from the outermost curve of the stack to the innermost, each over the one before
    const series = [...this.roles].reverse().map((role) => ({
      fill: this.colours[this.names[role]],
      width: 0,
      points: { show: false },
      paths: uPlot.paths.stepped({ align: 1 }),
    }));
    const axis = { stroke: () => shade("--soft"), font: "12px system-ui, sans-serif" };
    const grid = { stroke: () => shade("--line"), width: 1 };
    const tick = { stroke: () => shade("--line"), width: 1, size: 4 };
    const options = {
      width: Math.max(200, this.holder.clientWidth),
      height: this.holder.clientWidth < 560 ? 220 : 280,
      padding: [22, EDGE, 0, 0],
      legend: { show: false },
      cursor: { show: false },
      select: { show: false },
      scales: { x: { time: false, range: () => [view.start, view.end] }, y: { range: () => [0, this.top] } },
      series: [{}, ...series],
      axes: [
        {
          ...axis, grid, ticks: tick, size: 32,
          splits: (u, number, start, end) => ticks(start, end, u.bbox.width / devicePixelRatio / 110).found,
          values: (u, found) => tickTexts(found, found.length > 1 ? found[1] - found[0] : view.span),
        },
        { ...axis, grid, ticks: tick, size: this.gutter, values: (u, found) => found.map((b) => bytesText(b, 3)) },
      ],
      hooks: { draw: [(u) => this.marks(u)] },
    };
    this.plot = new uPlot(options, this.data(), this.holder);
    const { over } = this.plot;
    over.tabIndex = 0;
    over.setAttribute("role", "application");
    over.setAttribute("aria-label", `Bytes in use in ${this.tier.name} over time. Arrow keys move, plus and minus ` +
      "zoom, 0 shows all; Enter lists what is held at the middle.");
    gestures(over, view, {
      hover: (time, event) => this.hover(time, event),
      click: (time) => this.onPick(time),
      keys: (event) => event.key === "Enter" && (this.onPick((view.start + view.end) / 2), true),
    });
  }

  // Mark a moment, null for none.
  pick(time) {
    if (this.picked === time) return;
    this.picked = time;
    if (this.plot) this.plot.redraw(false);
  }

  data() {
    const { times, totals, levels } = this.tier;
    const { start, end } = this.view;
    const { low, high, kept } = thin(times, totals, start, end, Math.max(100, this.holder.clientWidth - this.gutter));
    const at = kept || Array.from({ length: high - low }, (_, i) => low + i);
    // the span's own ends, so that the curve reaches both edges
    const x = at.map((i) => Math.max(times[i], start));
    const last = at.length ? at[at.length - 1] : -1;
    x.push(end);
    const floor = new Float64Array(x.length);
    const curves = [];
    for (const role of this.roles) {
      const shown = !this.hidden.has(this.names[role]);
      const level = levels[role];
      const curve = new Array(x.length);
      for (let i = 0; i < at.length; i++) curve[i] = floor[i] += shown ? level[at[i]] : 0;
      curve[at.length] = floor[at.length] += shown && last >= 0 ? level[last] : 0;
      curves.unshift(curve);
    }
    return [x, ...curves];
  }

  draw() {
    if (!this.plot) return;
    const width = Math.max(200, this.holder.clientWidth);
    if (width !== this.plot.width) this.build(); // the window was turned or resized
    else this.plot.setData(this.data(), true);
  }

  marks(u) {
    const { ctx, bbox } = u;
    const scale = devicePixelRatio;
    const { tier } = this;
    ctx.save();
    ctx.font = `600 ${12 * scale}px system-ui, sans-serif`;
    ctx.fillStyle = ctx.strokeStyle = ink();
    if (this.limitShown) {
      const y = u.valToPos(tier.capacity, "y", true);
      ctx.setLineDash([6 * scale, 4 * scale]);
      ctx.lineWidth = 1.25 * scale;
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      ctx.setLineDash([]);
    }
    const end = u.valToPos(this.view.full, "x", true);
    if (this.asked && end >= bbox.left - 1 && end <= bbox.left + bbox.width + 1) { // from what was held to what was asked for
      const [from, to] = [this.asked.from, this.asked.to].map((bytes) => u.valToPos(bytes, "y", true));
      const half = 4.5 * scale;
      ctx.strokeStyle = shade("--bad");
      ctx.lineWidth = 2 * scale;
      ctx.beginPath();
      ctx.moveTo(end, from);
      ctx.lineTo(end, to);
      for (const side of [-1, 1]) {
        ctx.moveTo(end - half, to - side * half);
        ctx.lineTo(end + half, to + side * half);
      }
      ctx.stroke();
    }
    if (this.picked !== null) { // the moment whose tensors are listed
      const at = u.valToPos(this.picked, "x", true);
      if (at >= bbox.left - 1 && at <= bbox.left + bbox.width + 1) {
        ctx.lineWidth = 1.5 * scale;
        ctx.beginPath();
        ctx.moveTo(at, bbox.top);
        ctx.lineTo(at, bbox.top + bbox.height);
        ctx.stroke();
      }
    }
    const x = u.valToPos(tier.peak.time, "x", true);
    if (tier.peak.bytes && x >= bbox.left - 1 && x <= bbox.left + bbox.width + 1) {
      const y = u.valToPos(tier.peak.bytes, "y", true);
      const half = 5 * scale;
      ctx.beginPath();
      ctx.moveTo(x, y - 1 * scale);
      ctx.lineTo(x - half, y - 1.8 * half);
      ctx.lineTo(x + half, y - 1.8 * half);
      ctx.closePath();
      ctx.fill();
      ctx.lineWidth = 1.5 * scale;
      ctx.strokeStyle = shade("--card");
      ctx.stroke();
    }
    ctx.restore();
  }

  hover(time, event) {
    if (time === null) return hideTip();
    const { tier } = this;
    const at = atOrBefore(tier.times, time);
    const total = at < 0 ? 0 : tier.totals[at];
    const roles = [...this.roles].reverse().map((role) => [
      words(this.names[role]), at < 0 ? "0 B" : bytesText(tier.levels[role][at]), this.colours[this.names[role]]]);
    return showTip(event, `${bytesText(total)} in ${tier.name}`, [
      ["at", timeText(time, 6)], ...roles, ["free", bytesText(Math.max(0, tier.capacity - total))]]);
  }
}

const EDGE = 14; // pixels right of the plotted area
// Pixels left of the plotted area: names of lanes and sizes stand there.
const gutter = (holder) => (holder.clientWidth < 560 ? 62 : 104);
