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
function markerSign(colour, shape) {
  const made = el("canvas", { class: "marker", width: 32, height: 32, "aria-hidden": "true" });
  const draw = () => {
    const context = made.getContext("2d");
    context.clearRect(0, 0, 32, 32);
    context.fillStyle = policyInk(colour);
    marker(context, shape, 16, 16, 9);
    context.fill();
  };
  draw();
  darkness.addEventListener("change", draw);
  return made;
}

const darkness = matchMedia("(prefers-color-scheme: dark)");
const policyInk = (colour) => (colour === "#000000" ? ink() : colour);

// A scale from values to 0..1 with its ticks: logarithmic where they differ by more than a factor of twenty.
function scaleOf(values, room) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (!(low <= high)) [low, high] = [0, 1];
  if (low > 0 && high / low > 20) {
    const [a, b] = [Math.log(low * 0.85), Math.log(high * 1.15)];
    const found = [];
    const steps = (b - a) / Math.LN10 > room / 2.5 ? [1] : [1, 2, 5];
    for (let power = Math.floor(a / Math.LN10); power <= b / Math.LN10; power++) {
      for (const n of steps) if (n * 10 ** power >= Math.exp(a) && n * 10 ** power <= Math.exp(b)) found.push(n * 10 ** power);
    }
    return { at: (value) => (Math.log(value) - a) / (b - a), ticks: found };
  }
  const spare = 0.08 * (high - low) || 0.1 * high || 1;
  const start = low - spare < 0.3 * high ? 0 : low - spare;
  const end = high + spare;
  return { at: (value) => (value - start) / (end - start), ticks: ticks(start, end, room).found };
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

  draw() {
    const width = Math.max(240, this.holder.clientWidth);
    const height = width < 560 ? 300 : 380;
    const scale = devicePixelRatio;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    context.font = "12px system-ui, sans-serif";
    const [left, right, top, bottom] = [70, 16, 12, 48];
    const [w, h] = [width - left - right, height - top - bottom];
    const xs = scaleOf(this.points.map((p) => p.x), w / 90);
    const ys = scaleOf([...this.points.map((p) => p.y), ...(this.limit ? [this.limit] : [])], h / 50);
    context.strokeStyle = shade("--line");
    context.fillStyle = shade("--soft");
    context.lineWidth = 1;
    context.textAlign = "center";
    context.beginPath();
    for (const value of xs.ticks) {
      const x = Math.round(left + xs.at(value) * w) + 0.5;
      context.moveTo(x, top);
      context.lineTo(x, top + h);
      context.fillText(timeText(value, 3), x, top + h + 17);
    }
    context.textAlign = "right";
    for (const value of ys.ticks) {
      const y = Math.round(top + h - ys.at(value) * h) + 0.5;
      context.moveTo(left, y);
      context.lineTo(left + w, y);
      context.fillText(bytesText(value, 3), left - 8, y + 4);
    }
    context.stroke();
    context.textAlign = "center";
    context.fillText("time of an iteration", left + w / 2, height - 8);
    context.save();
    context.translate(11, top + h / 2);
    context.rotate(-Math.PI / 2);
    context.fillText("peak memory", 0, 0);
    context.restore();
    this.places = this.points.map((point) => [left + xs.at(point.x) * w, top + h - ys.at(point.y) * h]);
    this.said = null;
    this.lines(context, { left, top, w, h }, xs, ys);
    context.lineWidth = 1.6;
    const many = this.points.length > 400;
    context.globalAlpha = many ? 0.65 : 0.95;
    this.points.forEach((point, i) => {
      marker(context, point.shape, this.places[i][0], this.places[i][1], many ? 3.4 : 5);
      context.fillStyle = point.hollow ? shade("--card") : policyInk(point.colour);
      context.strokeStyle = policyInk(point.colour);
      context.fill();
      context.stroke();
    });
    context.globalAlpha = 1;
    if (this.points.length <= NAMED && width >= 560) this.names(context, { left, top, right: left + w, bottom: top + h });
    if (!this.points.length) {
      context.textAlign = "center";
      context.fillText("no run fits", left + w / 2, top + h / 2);
    }
    tellAgain();
  }

  // The budget, and the front: to its right and above it another run has both less time and a lower peak.
  lines(context, { left, top, w, h }, xs, ys) {
    context.lineWidth = 1.2;
    context.strokeStyle = shade("--soft");
    if (this.limit) {
      const y = Math.round(top + h - ys.at(this.limit) * h) + 0.5;
      context.setLineDash([6, 4]);
      context.beginPath();
      context.moveTo(left, y);
      context.lineTo(left + w, y);
      context.stroke();
      const said = `budget ${bytesText(this.limit, 3)}`;
      const width = context.measureText(said).width;
      const base = y > top + 20 ? y - 5 : y + 14;
      const boxes = [left + w - width - 4, left + 4, left + (w - width) / 2].map((x) => [x, base - 11, x + width, base + 3]);
      this.said = boxes.find((box) => !this.places.some(([x, y]) => x > box[0] - 7 && x < box[2] + 7 && y > box[1] - 7 && y < box[3] + 7)) || boxes[0];
      context.textAlign = "left";
      context.fillText(said, this.said[0], base);
    }
    context.setLineDash([2, 3]);
    context.beginPath();
    this.front.forEach((point, i) => {
      const [x, y] = [left + xs.at(point.x) * w, top + h - ys.at(point.y) * h];
      if (i) context.lineTo(x, top + h - ys.at(this.front[i - 1].y) * h); // as long as the one before has the lowest peak
      context[i ? "lineTo" : "moveTo"](x, y);
    });
    context.stroke();
    context.setLineDash([]);
  }

  // Names beside the markers, where one finds room that no marker and no other name takes.
  names(context, frame) {
    const taken = this.places.map(([x, y]) => [x - 7, y - 7, x + 7, y + 7]).concat(this.said ? [this.said] : []);
    context.fillStyle = ink();
    context.textAlign = "left";
    this.points.forEach(({ name }, i) => {
      const width = context.measureText(name).width;
      const [x, y] = this.places[i];
      const sides = [[x + 10, y + 4], [x - 10 - width, y + 4], [x - width / 2, y - 11], [x - width / 2, y + 19],
        [x + 8, y - 8], [x + 8, y + 16], [x - 8 - width, y - 8], [x - 8 - width, y + 16]];
      for (const [a, b] of sides) {
        const box = [a - 2, b - 11, a + width + 2, b + 3];
        if (box[0] < frame.left || box[1] < frame.top || box[2] > frame.right || box[3] > frame.bottom) continue;
        if (taken.some((other) => box[0] < other[2] && other[0] < box[2] && box[1] < other[3] && other[1] < box[3])) continue;
        taken.push(box);
        context.fillText(name, a, b);
        break;
      }
    });
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
