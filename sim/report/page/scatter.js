// Time against peak memory: a marker a run, in its policy's colour and shape; hollow for a reconstruction.

const SHAPES = {
  s: [[-1, -1], [1, -1], [1, 1], [-1, 1]],
  "^": [[0, -1.25], [1.15, 0.9], [-1.15, 0.9]],
  v: [[0, 1.25], [1.15, -0.9], [-1.15, -0.9]],
  "<": [[-1.25, 0], [0.9, 1.15], [0.9, -1.15]],
  ">": [[1.25, 0], [-0.9, 1.15], [-0.9, -1.15]],
  D: [[0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]],
  P: [[-0.4, -1.2], [0.4, -1.2], [0.4, -0.4], [1.2, -0.4], [1.2, 0.4], [0.4, 0.4], [0.4, 1.2], [-0.4, 1.2],
    [-0.4, 0.4], [-1.2, 0.4], [-1.2, -0.4], [-0.4, -0.4]],
  X: [[-1.1, -0.6], [-0.6, -1.1], [0, -0.5], [0.6, -1.1], [1.1, -0.6], [0.5, 0], [1.1, 0.6], [0.6, 1.1], [0, 0.5],
    [-0.6, 1.1], [-1.1, 0.6], [-0.5, 0]],
  p: [0, 1, 2, 3, 4].map((n) => [1.2 * Math.sin((n * 2 * Math.PI) / 5), -1.2 * Math.cos((n * 2 * Math.PI) / 5)]),
  h: [0, 1, 2, 3, 4, 5].map((n) => [1.15 * Math.sin((n * Math.PI) / 3), -1.15 * Math.cos((n * Math.PI) / 3)]),
};

function marker(context, shape, x, y, size) {
  context.beginPath();
  if (SHAPES[shape]) SHAPES[shape].forEach(([dx, dy], i) => context[i ? "lineTo" : "moveTo"](x + dx * size, y + dy * size));
  else context.arc(x, y, 1.1 * size, 0, 2 * Math.PI);
  context.closePath();
}

// A policy's marker as an element.
function markerSign(colour, shape, hollow) {
  const made = el("canvas", { class: "marker", width: 32, height: 32, "aria-hidden": "true" });
  const draw = () => {
    const context = made.getContext("2d");
    context.clearRect(0, 0, 32, 32);
    context.fillStyle = policyInk(colour);
    context.strokeStyle = policyInk(colour);
    context.lineWidth = 3;
    marker(context, shape, 16, 16, 9);
    if (hollow) context.stroke();
    else context.fill();
  };
  draw();
  darkness.addEventListener("change", draw);
  return made;
}

const darkness = matchMedia("(prefers-color-scheme: dark)");
const policyInk = (colour) => (colour === "#000000" ? ink() : colour);

const LEAST = 0.01; // the least that an axis spans, as a part of its values: less is no difference that counts

// A scale from values to 0..1 with its ticks and their texts: logarithmic where they differ by more than a factor.
function scaleOf(values, room, factor, units) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (!(low <= high)) [low, high] = [0, 1];
  if (low > 0 && high / low > factor) {
    const [a, b] = [Math.log(low * 0.85), Math.log(high * 1.15)];
    const found = [];
    const steps = (b - a) / Math.LN10 > room / 2.5 ? [1] : [1, 2, 5];
    for (let power = Math.floor(a / Math.LN10); power <= b / Math.LN10; power++) {
      for (const n of steps) if (n * 10 ** power >= Math.exp(a) && n * 10 ** power <= Math.exp(b)) found.push(n * 10 ** power);
    }
    return { logarithmic: true, at: (value) => (Math.log(value) - a) / (b - a), ticks: found, texts: found.map((value) => inUnit(value, units, 3)) };
  }
  const middle = (low + high) / 2;
  if (high - low < LEAST * middle) [low, high] = [middle * (1 - LEAST / 2), middle * (1 + LEAST / 2)];
  const spare = 0.08 * (high - low) || 0.1 * high || 1;
  const start = low - spare < 0.3 * high ? 0 : low - spare;
  const end = high + spare;
  const { step, found } = ticks(start, end, room);
  return { at: (value) => (value - start) / (end - start), ticks: found, texts: tickTexts(found, step, units) };
}

// The points that no other beats in both, by time.
function undominated(points) {
  const found = [];
  for (const point of [...points].sort((a, b) => a.x - b.x || a.y - b.y)) {
    if (!found.length || point.y < found[found.length - 1].y) found.push(point);
  }
  return found;
}

const NAMED = 40; // above, names would lie on each other

const meets = (a, b) => a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];

// Where the name of a marker may begin, its base line, and whether that is so far off that a line must lead there.
function spotsAround(x, y, width) {
  const spots = [[x + 10, y + 4], [x - 10 - width, y + 4], [x - width / 2, y - 11], [x - width / 2, y + 19],
    [x + 8, y - 8], [x + 8, y + 16], [x - 8 - width, y - 8], [x - 8 - width, y + 16]].map(([a, b]) => [a, b, false]);
  for (const away of [16, 26, 38, 52, 68, 86, 106, 130, 160]) {
    for (let n = 0; n < 24; n++) {
      const [dx, dy] = [Math.cos((n * Math.PI) / 12), Math.sin((n * Math.PI) / 12)];
      spots.push([x + dx * (away + width / 2) - width / 2, y + dy * (away + 7) + 4, true]);
    }
  }
  return spots;
}

// A line as small boxes, for what lies on it.
function between([x0, y0], [x1, y1]) {
  const count = Math.ceil(Math.hypot(x1 - x0, y1 - y0) / 3);
  return Array.from({ length: count }, (_, n) => {
    const [x, y] = [x0 + ((x1 - x0) * (n + 0.5)) / count, y0 + ((y1 - y0) * (n + 0.5)) / count];
    return [x - 2, y - 2, x + 2, y + 2];
  });
}

class Scatter {
  // points: {x ns, y bytes, colour, shape, hollow, row}; tell(row) gives [title, lines]; open(row) on a click.
  constructor({ tell, open }) {
    this.points = [];
    this.tell = tell;
    this.open = open;
    this.canvas = el("canvas", { role: "img", "aria-label": "Time of an iteration against peak memory, a marker a run; the table below has the same figures." });
    this.holder = el("div", { class: "scatter" }, this.canvas);
    tellers.set(this.canvas, { tell: (event) => this.hover(event), stop: hideTip });
    this.canvas.addEventListener("click", (event) => {
      const found = this.nearest(event);
      if (found) this.open(found.row);
    });
    darkness.addEventListener("change", () => this.draw());
  }

  // limit: the budget of all points, where they have one; front: whether they are of one job, so that one can beat another.
  show(points, { limit = null, front = false } = {}) {
    this.points = points;
    const highest = points.reduce((most, p) => Math.max(most, p.y), 0);
    this.limit = limit && limit <= 1.3 * highest ? limit : null; // one far above would flatten the rest
    this.front = front ? undominated(points) : [];
    this.draw();
  }

  // An empty canvas as wide as its place.
  begin() {
    const width = Math.max(240, this.holder.clientWidth);
    const height = width < 560 ? 300 : 380;
    const scale = devicePixelRatio;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    context.font = "12px system-ui, sans-serif";
    return { context, width, height };
  }

  draw() {
    const { context, width, height } = this.begin();
    const [right, top, bottom] = [16, 12, 48];
    const h = height - top - bottom;
    const ys = scaleOf([...this.points.map((p) => p.y), ...(this.limit ? [this.limit] : [])], h / 50, 20, BYTES);
    const sizes = ys.texts.map((said) => context.measureText(said).width);
    const left = Math.ceil(Math.max(38, ...sizes)) + 30; // the ticks' texts, and the axis's own name beside them
    const w = width - left - right;
    const xs = scaleOf(this.points.map((p) => p.x), w / 90, 5, TIMES);
    this.axes(context, { left, top, w, h, foot: 0, height, width }, xs, ys, "time of an iteration", "peak memory");
    const frame = { left, top, right: left + w, bottom: top + h };
    this.places = this.points.map((point) => [left + xs.at(point.x) * w, top + h - ys.at(point.y) * h]);
    const taken = this.places.map(([x, y]) => [x - 7, y - 7, x + 7, y + 7]).concat(this.lines(context, frame, xs, ys));
    const many = this.points.length > 400;
    const named = this.points.length <= NAMED && width >= 560 ? this.named(context, frame, taken) : [];
    for (const { from, to } of named.filter((name) => name.from)) {
      context.beginPath();
      context.moveTo(...from);
      context.lineTo(...to);
      context.stroke();
    }
    context.lineWidth = 1.6;
    context.globalAlpha = many ? 0.65 : 0.95;
    this.points.forEach((point, i) => {
      marker(context, point.shape, this.places[i][0], this.places[i][1], many ? 3.4 : 5);
      context.fillStyle = point.hollow ? shade("--card") : policyInk(point.colour);
      context.strokeStyle = policyInk(point.colour);
      context.fill();
      context.stroke();
    });
    context.globalAlpha = 1;
    context.fillStyle = ink();
    context.textAlign = "left";
    for (const { name, x, y } of named) context.fillText(name, x, y);
    tellAgain();
  }

  // Grid, ticks and names of both axes. foot: what lies between the plotted area and the texts below it.
  axes(context, { left, top, w, h, foot, height, width }, xs, ys, below, beside) {
    context.strokeStyle = shade("--line");
    context.fillStyle = shade("--soft");
    context.lineWidth = 1;
    context.textAlign = "center";
    context.beginPath();
    for (const [i, value] of xs.ticks.entries()) {
      const x = Math.round(left + xs.at(value) * w) + 0.5;
      context.moveTo(x, top);
      context.lineTo(x, top + h + foot);
      const half = context.measureText(xs.texts[i]).width / 2;
      context.fillText(xs.texts[i], Math.min(x, width - half - 2), top + h + foot + 17);
    }
    context.textAlign = "right";
    for (const [i, value] of ys.ticks.entries()) {
      const y = Math.round(top + h - ys.at(value) * h) + 0.5;
      context.moveTo(left, y);
      context.lineTo(left + w, y);
      context.fillText(ys.texts[i], left - 8, y + 4);
    }
    context.stroke();
    context.textAlign = "center";
    const named = (name, scale) => (scale.logarithmic ? `${name}, logarithmic` : name);
    context.fillText(named(below, xs), left + w / 2, height - 8);
    context.save();
    context.translate(11, top + h / 2);
    context.rotate(-Math.PI / 2);
    context.fillText(named(beside, ys), 0, 0);
    context.restore();
  }

  // The budget, and the front: to its right and above it another run has both less time and a lower peak. Returns what
  // they take, as boxes.
  lines(context, { left, top, right, bottom }, xs, ys) {
    const [w, h] = [right - left, bottom - top];
    const taken = [];
    const line = (x0, y0, x1, y1) => {
      context.beginPath();
      context.moveTo(x0, y0);
      context.lineTo(x1, y1);
      context.stroke();
      taken.push([Math.min(x0, x1) - 2, Math.min(y0, y1) - 2, Math.max(x0, x1) + 2, Math.max(y0, y1) + 2]);
    };
    context.lineWidth = 1.2;
    context.strokeStyle = shade("--soft");
    context.setLineDash([2, 3]);
    const front = this.front.map((point) => [left + xs.at(point.x) * w, bottom - ys.at(point.y) * h]);
    front.forEach(([x, y], i) => {
      if (!i) return;
      const [before, level] = front[i - 1];
      line(before, level, x, level); // as long as the one before has the lowest peak
      line(x, level, x, y);
    });
    context.setLineDash([]);
    if (!this.limit) return taken;
    const y = Math.round(bottom - ys.at(this.limit) * h) + 0.5;
    const said = `budget ${bytesText(this.limit, 3)}`;
    const width = context.measureText(said).width;
    const markers = this.places.map(([px, py]) => [px - 7, py - 7, px + 7, py + 7]);
    const spots = [];
    for (const base of [y - 5, y + 14, y - 12, y + 21]) { // beside the line, then beyond the markers on it
      for (let x = right - width - 4; x >= left + 4; x -= 20) spots.push([x - 2, base - 11, x + width + 2, base + 3]);
    }
    const free = (box) => box[1] >= top && box[3] <= bottom && ![...taken, ...markers].some((other) => meets(box, other));
    const box = spots.find(free) || spots[0];
    context.setLineDash([6, 4]);
    line(left, y, right, y);
    context.setLineDash([]);
    context.textAlign = "left";
    context.fillText(said, box[0] + 2, box[3] - 3);
    taken.push(box);
    return taken;
  }

  // Where names find room that no marker, no line and no other name takes: beside the marker, or farther off at the end of
  // a line from it. What finds none is told by the box beside the pointer and by the table.
  named(context, frame, taken) {
    const near = this.places.map(([x, y]) => this.places.filter(([a, b]) => Math.hypot(a - x, b - y) < 60).length);
    const found = [];
    const fits = (i, [a, b, far], width, markers) => {
      const [x, y] = this.places[i];
      const box = [a - 2, b - 11, a + width + 2, b + 3];
      if (box[0] < frame.left || box[1] < frame.top || box[2] > frame.right || box[3] > frame.bottom) return null;
      if (taken.some((other) => meets(box, other))) return null;
      if (!far) return { box, steps: [] };
      const to = [Math.max(box[0], Math.min(x, box[2])), Math.max(box[1], Math.min(y, box[3]))];
      const steps = between([x, y], to);
      return steps.some((step) => [...markers, ...found.map((name) => name.box)].some((other) => meets(step, other)))
        ? null : { box, steps, from: [x, y], to };
    };
    const first = this.points.map((point) => this.front.includes(point)); // the front has its names before all others
    for (const i of this.places.map((_, at) => at).sort((a, b) => first[b] - first[a] || near[b] - near[a] || a - b)) {
      const { name } = this.points[i];
      const [x, y] = this.places[i];
      const width = context.measureText(name).width;
      const others = this.places.filter(([a, b]) => Math.hypot(a - x, b - y) > 1).map(([a, b]) => [a - 5, b - 5, a + 5, b + 5]);
      for (const markers of [others, []]) { // in a crowd a line may pass behind other markers
        let room = null;
        const spot = spotsAround(x, y, width).find((each) => (room = fits(i, each, width, markers)));
        if (!spot) continue;
        taken.push(room.box, ...room.steps);
        found.push({ name, x: spot[0], y: spot[1], ...room });
        break;
      }
    }
    return found;
  }

  nearest(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let best = -1;
    let least = 14 ** 2;
    (this.places || []).forEach(([px, py], i) => {
      const away = (px - x) ** 2 + (py - y) ** 2;
      if (away < least) [least, best] = [away, i];
    });
    return best < 0 ? null : this.points[best];
  }

  hover(event) {
    const found = this.nearest(event);
    this.canvas.style.cursor = found ? "pointer" : "";
    if (!found) hideTip();
    else showTip(event, ...this.tell(found.row), policyInk(found.colour));
  }
}
