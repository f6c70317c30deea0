// The span of time that all figures of a run show, and how people change it: drag, wheel, pinch, keys, buttons.

class Viewport {
  constructor(full) {
    this.full = Math.max(full, 1);
    this.start = 0;
    this.end = this.full;
    this.cursor = null; // the time under the pointer
    this.drawers = [];
    this.pointers = [];
    this.waiting = false;
  }

  get span() { return this.end - this.start; }

  set(start, end) {
    const least = Math.min(this.full, 20); // ns
    const span = Math.min(this.full, Math.max(least, end - start));
    const middle = (start + end) / 2;
    this.start = Math.max(0, Math.min(this.full - span, middle - span / 2));
    this.end = this.start + span;
    this.redraw();
  }

  zoom(factor, at = (this.start + this.end) / 2) {
    const span = Math.min(this.full, this.span * factor);
    const share = (at - this.start) / this.span;
    this.set(at - share * span, at + (1 - share) * span);
  }

  pan(share) { this.set(this.start + share * this.span, this.end + share * this.span); }
  all() { this.set(0, this.full); }

  // Draw at once at the next frame, however often it was asked for.
  redraw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      for (const draw of this.drawers) draw();
      tellAgain();
    });
  }

  point(time) {
    this.cursor = time;
    for (const move of this.pointers) move(time);
  }
}

// Round times in a span, about `count` of them.
function ticks(start, end, count) {
  const raw = (end - start) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw);
  const found = [];
  for (let i = Math.ceil(start / step); i * step <= end; i++) found.push(i * step);
  return { step, found };
}

// Texts of times, or of others that have units, that differ by `step`: one unit, as many digits as the step needs.
function tickTexts(times, step, units = TIMES) {
  const largest = Math.max(...times.map(Math.abs), step);
  const [one, unit] = units.find(([size]) => largest >= size) || units[units.length - 1];
  const places = Math.max(0, Math.min(9, -Math.floor(Math.log10(step / one) + 1e-9)));
  return times.map((time) => `${(time / one).toLocaleString("en-US",
    { minimumFractionDigits: places, maximumFractionDigits: places })} ${unit}`);
}

// Gestures on an element that covers the plotted area. hover(time, event or null), click(time, event).
function gestures(host, view, { hover = null, click = null, keys = null } = {}) {
  const timeAt = (x) => {
    const box = host.getBoundingClientRect();
    return view.start + ((x - box.left) / box.width) * view.span;
  };
  const line = el("div", { class: "cursor", "aria-hidden": "true" });
  const band = el("div", { class: "band", "aria-hidden": "true" });
  host.append(line, band);
  const place = (time) => {
    const share = time === null ? -1 : (time - view.start) / view.span;
    line.hidden = !(share >= 0 && share <= 1);
    line.style.left = `${100 * share}%`;
  };
  view.pointers.push(place);
  view.drawers.push(() => place(view.cursor));
  place(null);
  band.hidden = true;
  tellers.set(host, {
    tell(event) {
      const time = timeAt(event.clientX);
      view.point(time);
      if (hover) hover(time, event);
    },
    stop() {
      view.point(null);
      if (hover) hover(null);
    },
  });

  const touches = new Map();
  let from = null; // where a drag of the mouse began
  let moved = false;

  host.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    touches.set(event.pointerId, event.clientX);
    from = event.clientX;
    moved = false;
    if (event.pointerType === "mouse") host.setPointerCapture(event.pointerId);
  });
  host.addEventListener("pointermove", (event) => {
    if (event.pointerType === "mouse") {
      if (from !== null && touches.size && Math.abs(event.clientX - from) > 4) {
        moved = true;
        const box = host.getBoundingClientRect();
        const left = Math.max(box.left, Math.min(from, event.clientX));
        const right = Math.min(box.right, Math.max(from, event.clientX));
        band.hidden = false;
        band.style.left = `${left - box.left}px`;
        band.style.width = `${Math.max(0, right - left)}px`;
      }
    } else if (touches.has(event.pointerId)) {
      const before = [...touches.values()];
      const times = [...touches.keys()].map((id) => timeAt(touches.get(id)));
      touches.set(event.pointerId, event.clientX);
      if (Math.abs(event.clientX - from) > 6 || touches.size > 1) {
        moved = true;
        tellNothing(); // what a tap has told is no longer there
      }
      if (touches.size === 1 && moved) {
        const width = host.getBoundingClientRect().width;
        view.pan((before[0] - event.clientX) / width);
      } else if (touches.size === 2) {
        const [a, b] = [...touches.values()];
        const box = host.getBoundingClientRect();
        if (Math.abs(a - b) > 8) {
          const rate = (times[1] - times[0]) / (b - a); // ns a pixel that keeps both fingers on their times
          if (rate > 0) {
            const start = times[0] - (a - box.left) * rate;
            view.set(start, start + box.width * rate);
          }
        }
      }
    }
  });
  const release = (event) => {
    if (!touches.has(event.pointerId)) return;
    touches.delete(event.pointerId);
    band.hidden = true;
    if (event.type === "pointerup" && event.pointerType === "mouse" && moved) {
      const [a, b] = [timeAt(from), timeAt(event.clientX)].sort((x, y) => x - y);
      view.set(Math.max(0, a), Math.min(view.full, b));
    } else if (event.type === "pointerup" && !moved) {
      tellUnder(event);
      if (click) click(timeAt(event.clientX), event);
    }
    if (!touches.size) from = null;
  };
  host.addEventListener("pointerup", release);
  host.addEventListener("pointercancel", release);
  host.addEventListener("dblclick", () => view.all());
  host.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      view.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 100))), timeAt(event.clientX));
    } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      view.pan(event.deltaX / host.getBoundingClientRect().width);
    }
  }, { passive: false });
  host.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (keys && keys(event)) event.preventDefault();
    else if (event.key === "+" || event.key === "=") view.zoom(0.5);
    else if (event.key === "-") view.zoom(2);
    else if (event.key === "0" || event.key === "Home") view.all();
    else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      event.preventDefault();
      view.pan(event.key === "ArrowLeft" ? -0.2 : 0.2);
    }
  });
}

// One box beside the pointer that says what lies under it.
const tip = el("div", { class: "tip", role: "status", hidden: true });

function showTip(event, title, lines, colour = null) {
  tip.replaceChildren(
    el("p", { class: "tip-title" }, colour ? swatch(colour) : null, title),
    el("dl", {}, lines.filter(([, text]) => text !== "" && text !== null && text !== undefined)
      .flatMap(([name, text, dot]) => [el("dt", {}, dot ? swatch(dot) : null, name), el("dd", {}, text)])));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const [x, y] = [event.clientX, event.clientY];
  const left = x + 16 + box.width > innerWidth - 8 ? Math.max(8, x - 16 - box.width) : x + 16;
  const top = Math.max(8, Math.min(y + 16, innerHeight - box.height - 8));
  tip.style.left = `${left + scrollX}px`;
  tip.style.top = `${top + scrollY}px`;
}

function hideTip() { tip.hidden = true; }

// The tip says what lies under the pointer, also where the page changes beneath one that rests.
const tellers = new WeakMap(); // by element: tell(event) shows what lies there, stop() ends it
let pointed = null; // the event, and how far the page was scrolled then
let told = null; // the element that was told about

function tellUnder(event) {
  pointed = { event, scrolled: [scrollX, scrollY] };
  let host = document.elementFromPoint(event.clientX, event.clientY);
  while (host && !tellers.has(host)) host = host.parentElement;
  if (told && told !== host) tellers.get(told).stop();
  told = host;
  if (host) tellers.get(host).tell(event);
}

function tellAgain() {
  queueMicrotask(() => { if (pointed) tellUnder(pointed.event); }); // uPlot lays itself out in one, too
}

function tellNothing() {
  if (told) tellers.get(told).stop();
  pointed = told = null;
}

document.addEventListener("pointermove", (event) => {
  if (event.pointerType === "mouse" || (event.pointerType === "pen" && !event.buttons)) tellUnder(event);
});
document.documentElement.addEventListener("pointerleave", (event) => {
  if (event.pointerType === "mouse") tellNothing();
});
addEventListener("scroll", () => {
  if (!pointed || (pointed.scrolled[0] === scrollX && pointed.scrolled[1] === scrollY)) return;
  if (pointed.event.pointerType === "mouse") tellAgain();
  else tellNothing(); // what was tapped has moved away
}, { passive: true });
addEventListener("keydown", (event) => {
  if (event.key === "Escape") tellNothing();
});
