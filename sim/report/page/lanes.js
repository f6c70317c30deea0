// What each engine and link did: a row each, on a canvas; empty is idle.

const LETTERS = "12px system-ui, sans-serif";

class Lanes {
  constructor(view, run, lanes, { whys, inks }) {
    this.view = view;
    this.run = run;
    this.data = lanes;
    this.colours = run.whys.map((why) => whys[why]);
    this.inks = run.whys.map((why) => inks[why]); // of names on these colours
    const { tracks } = lanes;
    this.tracks = tracks.filter((track) => track.main || track.last > track.first).sort((a, b) => a.group - b.group);
    this.chosen = null; // {track, row}: what keys and clicks have picked
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.area = el("div", {
      class: "area", tabindex: "0", role: "application",
      "aria-label": "Lanes of engines and links. Left and right step through intervals, up and down change the lane, " +
        "plus and minus zoom, 0 shows all, Shift with left and right moves the view.",
    });
    this.said = el("p", { class: "said", role: "status", "aria-live": "polite" });
    this.holder = el("div", { class: "lanes" }, this.canvas, this.area);
    gestures(this.area, view, {
      hover: (time, event) => this.hover(time, event),
      click: (time, event) => this.pick(this.hit(time, event)),
      keys: (event) => this.key(event),
    });
    view.drawers.push(() => this.draw());
  }

  layout() {
    this.width = Math.max(200, this.holder.clientWidth);
    this.left = gutter(this.holder);
    const context = this.canvas.getContext("2d");
    context.font = LETTERS;
    this.above = this.tracks.some((track) => context.measureText(track.name).width > this.left - 12);
    this.row = this.above ? 42 : 30; // names that find no room beside the bars stand above them
    this.bar = 22;
    let y = 4;
    let group = -1;
    const grouped = new Set(this.tracks.map((track) => track.group)).size > 1 && this.data.groups.length > 2;
    this.heads = [];
    this.tops = this.tracks.map((track) => {
      if (grouped && track.group !== group) {
        group = track.group;
        this.heads.push([y + 13, this.data.groups[group]]);
        y += 20;
      }
      y += this.row;
      return y - this.bar - 4;
    });
    this.height = y + 6;
  }

  draw() {
    this.layout();
    const scale = devicePixelRatio;
    const { canvas, area, view } = this;
    const [width, height] = [Math.round(this.width * scale), Math.round(this.height * scale)];
    if (canvas.width !== width || canvas.height !== height) {
      canvas.width = width;
      canvas.height = height;
      canvas.style.height = `${this.height}px`;
      area.style.left = `${this.left}px`;
      area.style.right = `${EDGE}px`;
      area.style.height = `${this.height}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    const plot = this.width - this.left - EDGE;
    const look = { ink: ink(), soft: shade("--soft"), line: shade("--line"), card: shade("--card") };
    context.font = LETTERS;
    context.textBaseline = "middle";
    context.strokeStyle = look.line;
    context.lineWidth = 1;
    context.beginPath();
    for (const time of ticks(view.start, view.end, plot / 110).found) {
      const x = Math.round(this.left + ((time - view.start) / view.span) * plot) + 0.5;
      context.moveTo(x, 0);
      context.lineTo(x, this.height);
    }
    context.stroke();
    context.fillStyle = look.soft;
    for (const [y, name] of this.heads) context.fillText(name, 2, y);
    const hatch = this.hatch(context, look.card);
    this.tracks.forEach((track, number) => {
      const y = this.tops[number];
      context.fillStyle = look.ink;
      if (this.above) context.fillText(track.name, 2, y - 9);
      else {
        context.textAlign = "right";
        context.fillText(track.name, this.left - 8, y + this.bar / 2);
        context.textAlign = "left";
      }
      context.fillStyle = shade("--trough");
      context.fillRect(this.left, y, plot, this.bar);
      this.bars(context, track, y, plot, look, hatch);
    });
    this.outline(context, plot, look);
    this.drawn = (this.drawn || 0) + 1;
  }

  // Whole columns of pixels that one interval fills are its own; a column that several share is filled from below in
  // proportion to what it was busy with, but never so little that it could not be seen.
  bars(context, track, y, plot, look, hatch) {
    const { start, end, why } = this.data;
    const { view, left, bar } = this;
    const pixels = plot / view.span;
    const whole = this.colours.map(() => []);
    const shared = this.colours.map(() => []);
    const busy = new Float64Array(this.colours.length);
    const named = [];
    const edges = [];
    let column = -1;
    const move = (to) => {
      if (to === column) return;
      let floor = y + bar;
      for (let code = 0; code < busy.length; code++) {
        if (!busy[code]) continue;
        const height = Math.min(floor - y, Math.max(1.5, Math.min(1, busy[code]) * bar));
        shared[code].push(left + column, floor - height, 1, height);
        floor -= height;
        busy[code] = 0;
      }
      column = to;
    };
    for (let i = after(end, view.start, track.first, track.last); i < track.last && start[i] < view.end; i++) {
      const x0 = Math.max(0, (start[i] - view.start) * pixels);
      const x1 = Math.min(plot, (end[i] - view.start) * pixels);
      const code = why[i];
      if (x1 - x0 > 6) {
        const [from, to] = [Math.round(x0), Math.round(x1)];
        whole[code].push(left + from, y, to - from, bar);
        if (x1 < plot) edges.push(left + to - 1);
        if (x1 - x0 > 34) named.push(i, left + x0, x1 - x0);
        continue;
      }
      const [from, to] = [Math.min(plot - 1, Math.floor(x0)), Math.floor(x1)];
      move(from);
      if (to <= from) {
        busy[code] += Math.max(x1 - x0, 1e-6);
        continue;
      }
      const first = x0 > from ? from + 1 : from;
      if (x0 > from) busy[code] += from + 1 - x0;
      if (to > first) whole[code].push(left + first, y, to - first, bar);
      if (x1 > to) {
        move(to);
        busy[code] += x1 - to;
      }
    }
    move(-1);
    for (const rects of [whole, edges, shared]) {
      if (rects === edges) {
        context.fillStyle = look.card;
        for (const x of edges) context.fillRect(x, y, 1, bar);
        continue;
      }
      rects.forEach((list, code) => {
        if (!list.length) return;
        context.beginPath();
        for (let i = 0; i < list.length; i += 4) context.rect(list[i], list[i + 1], list[i + 2], list[i + 3]);
        const stall = this.run.whys[code] === "stall";
        context.fillStyle = stall && rects === whole ? hatch : this.colours[code];
        context.fill();
      });
    }
    for (let i = 0; i < named.length; i += 3) {
      const [row, x, width] = [named[i], named[i + 1], named[i + 2]];
      const what = this.run.whys[why[row]];
      const text = clipped(context, this.name(row, false), width - 10);
      if (text.length < 3) continue;
      if (what === "stall") {
        context.fillStyle = look.card;
        const size = context.measureText(text).width;
        context.fillRect(x + 4, y + 4, size + 6, bar - 8);
        context.fillStyle = look.ink;
        context.fillText(text, x + 7, y + bar / 2 + 0.5);
      } else {
        context.fillStyle = this.inks[why[row]];
        context.fillText(text, x + 5, y + bar / 2 + 0.5);
      }
    }
  }

  // A stall is no work, so it is hatched: clear without colour too.
  hatch(context, ground) {
    const size = 8;
    const tile = document.createElement("canvas");
    const scale = devicePixelRatio;
    tile.width = tile.height = size * scale;
    const c = tile.getContext("2d");
    c.scale(scale, scale);
    c.fillStyle = ground;
    c.fillRect(0, 0, size, size);
    c.strokeStyle = this.colours[this.run.whys.indexOf("stall")];
    c.lineWidth = 1.6;
    c.beginPath();
    for (const shift of [-size, 0, size]) {
      c.moveTo(shift - 1, size + 1);
      c.lineTo(shift + size + 1, -1);
    }
    c.stroke();
    const pattern = context.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(1 / scale, 1 / scale));
    return pattern;
  }

  outline(context, plot, look) {
    if (!this.chosen) return;
    const number = this.tracks.indexOf(this.chosen.track);
    const { start, end } = this.data;
    const { view, left } = this;
    const x0 = Math.max(0, ((start[this.chosen.row] - view.start) / view.span) * plot);
    const x1 = Math.min(plot, ((end[this.chosen.row] - view.start) / view.span) * plot);
    if (x1 < 0 || x0 > plot) return;
    context.strokeStyle = look.ink;
    context.lineWidth = 2;
    context.strokeRect(left + x0 - 1, this.tops[number] - 1, Math.max(3, x1 - x0 + 1), this.bar + 2);
  }

  // The interval under the pointer, or the nearest within a few pixels; null for none.
  hit(time, event) {
    const y = event.clientY - this.area.getBoundingClientRect().top;
    const number = this.tops.findIndex((top) => y >= top - 3 && y <= top + this.bar + 4);
    if (number < 0) return null;
    const track = this.tracks[number];
    const { start, end } = this.data;
    const near = (4 * this.view.span) / this.area.getBoundingClientRect().width;
    const row = atOrBefore(start, time, track.first, track.last);
    const candidates = [row, row + 1].filter((i) => i >= track.first && i < track.last);
    const away = (i) => Math.max(0, start[i] - time, time - end[i]);
    const best = candidates.sort((a, b) => away(a) - away(b))[0];
    return best !== undefined && away(best) <= near ? { track, row: best } : null;
  }

  hover(time, event) {
    const found = time === null ? null : this.hit(time, event);
    if (!found) return hideTip();
    return showTip(event, this.name(found.row), this.lines(found), this.colours[this.data.why[found.row]]);
  }

  name(row, whole = true) {
    const { why, op, tensor, cause } = this.data;
    const { ops, tensors } = this.run;
    const what = this.run.whys[why[row]];
    if (what === "stall") {
      const text = this.run.causes[cause[row]][0];
      return whole ? `stall: ${text || "unnamed"}` : text || "stall";
    }
    if (what === "move" && tensor[row] >= 0) return tensors.name[tensor[row]];
    if (op[row] < 0) return what;
    return what === "recompute" && whole ? `recompute ${ops.name[op[row]]}` : ops.name[op[row]];
  }

  // What is known of an interval: [name, text].
  lines({ track, row }) {
    const { start, end, why, op, tensor, cause, bytes, device } = this.data;
    const { ops, tensors, kinds, phases, roles } = this.run;
    const what = this.run.whys[why[row]];
    const found = [["lane", track.name], ["why", what]];
    if (track.route) found.push(["from", track.route[0]], ["to", track.route[1]]);
    if (what === "stall") found.push(["waits for", this.run.causes[cause[row]][1]]);
    if (op[row] >= 0) {
      found.push(["op", ops.name[op[row]]], ["kind", kinds[ops.kind[op[row]]]], ["phase", phases[ops.phase[op[row]]]]);
    }
    if (tensor[row] >= 0) found.push(["tensor", tensors.name[tensor[row]]], ["role", words(roles[tensors.role[tensor[row]]])]);
    const ofTensor = tensor[row] >= 0 && (what === "move" || op[row] < 0) ? tensors.layer[tensor[row]] : -1;
    const layer = ofTensor < 0 && op[row] >= 0 ? ops.layer[op[row]] : ofTensor;
    if (layer >= 0) found.push(["layer", String(layer)]);
    if (bytes[row]) found.push(["bytes", bytesText(bytes[row])]);
    if (device[row] >= 0 && this.data.groups.length > 2) found.push(["device", String(device[row])]);
    found.push(["takes", timeText(end[row] - start[row])], ["start", timeText(start[row], 7)], ["end", timeText(end[row], 7)]);
    return found;
  }

  pick(found) {
    this.chosen = found;
    if (found) this.said.textContent = `${this.name(found.row)}: ${this.lines(found).slice(1).map(([k, v]) => `${k} ${v}`).join(", ")}`;
    else this.said.textContent = "";
    this.view.redraw();
  }

  key(event) {
    if (event.shiftKey || !event.key.startsWith("Arrow")) return false;
    if (!this.tracks.length) return true;
    const { start, end } = this.data;
    const middle = (this.view.start + this.view.end) / 2;
    const nearest = (track, time) => Math.min(track.last - 1, Math.max(track.first, atOrBefore(start, time, track.first, track.last)));
    let { track, row } = this.chosen || { track: this.tracks[0], row: -1 };
    if (row < 0) row = nearest(track, middle);
    else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      row = Math.max(track.first, Math.min(track.last - 1, row + (event.key === "ArrowLeft" ? -1 : 1)));
    } else {
      const step = event.key === "ArrowUp" ? -1 : 1;
      const time = start[row];
      track = this.tracks[Math.max(0, Math.min(this.tracks.length - 1, this.tracks.indexOf(track) + step))];
      row = nearest(track, time);
    }
    if (row < track.first) return true; // an idle lane
    if (end[row] < this.view.start || start[row] > this.view.end) {
      this.view.set(start[row] - this.view.span / 2, start[row] + this.view.span / 2);
    }
    this.pick({ track, row });
    return true;
  }
}

function clipped(context, text, room) {
  if (room < 8) return "";
  if (context.measureText(text).width <= room) return text;
  let [low, high] = [0, text.length];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (context.measureText(`${text.slice(0, middle)}…`).width <= room) low = middle;
    else high = middle - 1;
  }
  return low ? `${text.slice(0, low)}…` : "";
}
