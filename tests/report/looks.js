// What a person would see wrong on a page, found without one: text too faint, cut, or under other text, a line or a marker.
// Loaded before the page's own scripts, so that it can note what they draw; `looks()` then returns the faults.

(() => {
  const LEAST = 4.5; // WCAG 2.2, 1.4.3, of normal text; asked of all text here
  const drawn = new WeakMap(); // by canvas: {texts, lines, marks} of its last drawing, in CSS pixels of the canvas
  const paths = new WeakMap(); // by context: the path that is being made
  const fresh = () => ({ texts: [], lines: [], marks: [] });
  const of = (canvas) => drawn.get(canvas) || drawn.set(canvas, fresh()).get(canvas);

  // ---- colours -----------------------------------------------------------------------------------

  const pen = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const known = new Map();
  function rgba(text) {
    if (!known.has(text)) {
      pen.clearRect(0, 0, 1, 1);
      pen.fillStyle = text;
      pen.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
      known.set(text, [r, g, b, a / 255]);
    }
    return known.get(text);
  }
  const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a), 1];
  function luminance([r, g, b]) {
    const [x, y, z] = [r, g, b].map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  }
  function contrast(a, b) {
    const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  }
  // What lies behind an element's text, and how opaque the text is: [ground, opacity].
  function ground(element) {
    const layers = [];
    let opacity = 1;
    for (let at = element; at; at = at.parentElement) {
      const style = getComputedStyle(at);
      layers.push([rgba(style.backgroundColor), at]);
      opacity *= Number(style.opacity);
    }
    const canvas = matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18, 1] : [255, 255, 255, 1];
    return [layers.reverse().reduce((below, [colour]) => over(colour, below), canvas), opacity];
  }
  function contrastOf(element, colour) {
    const [below, opacity] = ground(element);
    const [r, g, b, a] = rgba(colour);
    return contrast(over([r, g, b, a * opacity], below), below);
  }

  // ---- what is drawn on a canvas -----------------------------------------------------------------

  const { prototype } = CanvasRenderingContext2D;
  const at = (context, x, y) => {
    const { a, b, c, d, e, f } = context.getTransform();
    const scale = context.canvas.width / (context.canvas.clientWidth || context.canvas.width);
    return [(a * x + c * y + e) / scale, (b * x + d * y + f) / scale];
  };
  const boxOf = (points) => [Math.min(...points.map((p) => p[0])), Math.min(...points.map((p) => p[1])),
    Math.max(...points.map((p) => p[0])), Math.max(...points.map((p) => p[1]))];
  const wrap = (name, before) => {
    const original = prototype[name];
    prototype[name] = function wrapped(...given) {
      if (this.canvas.isConnected) before(this, ...given);
      return original.apply(this, given);
    };
  };
  const { getContext } = HTMLCanvasElement.prototype;
  HTMLCanvasElement.prototype.getContext = function readable(kind, options) {
    return getContext.call(this, kind, { ...options, willReadFrequently: true }); // of what is drawn, pixels are read here
  };
  const width = Object.getOwnPropertyDescriptor(HTMLCanvasElement.prototype, "width");
  Object.defineProperty(HTMLCanvasElement.prototype, "width", { ...width, set(value) {
    drawn.set(this, fresh());
    width.set.call(this, value);
  } });
  wrap("clearRect", (context, x, y, w, h) => { if (w > 100 && h > 30) drawn.set(context.canvas, fresh()); });
  wrap("beginPath", (context) => paths.set(context, []));
  wrap("moveTo", (context, x, y) => paths.get(context)?.push([at(context, x, y)]));
  wrap("lineTo", (context, x, y) => paths.get(context)?.at(-1)?.push(at(context, x, y)));
  wrap("arc", (context, x, y, r) => paths.get(context)?.push([at(context, x - r, y - r), at(context, x + r, y + r), at(context, x - r, y + r)]));
  wrap("fill", (context, path) => {
    for (const part of path instanceof Path2D ? [] : paths.get(context) || []) if (part.length > 2) of(context.canvas).marks.push(boxOf(part));
  });
  wrap("stroke", (context, path) => {
    if (path instanceof Path2D) return;
    const faint = rgba(getComputedStyle(document.documentElement).getPropertyValue("--line").trim()).join();
    if (rgba(String(context.strokeStyle)).join() === faint) return; // the grid behind everything
    for (const part of paths.get(context) || []) {
      for (let i = 1; i < part.length && part.length === 2; i++) of(context.canvas).lines.push([part[i - 1], part[i]]);
    }
  });
  wrap("fillText", (context, text, x, y) => {
    const size = context.measureText(text);
    const [l, r, u, d] = [size.actualBoundingBoxLeft, size.actualBoundingBoxRight, size.actualBoundingBoxAscent, size.actualBoundingBoxDescent];
    const box = boxOf([[x - l, y - u], [x + r, y - u], [x - l, y + d], [x + r, y + d]].map((p) => at(context, ...p)));
    of(context.canvas).texts.push({ text, box, contrast: leastContrast(context, box) });
  });
  // Of a text that is about to be drawn, against each colour that has a part of what lies below it.
  function leastContrast(context, [left, top, right, bottom]) {
    const scale = context.canvas.width / (context.canvas.clientWidth || context.canvas.width);
    const [x, y, w, h] = [left, top, right - left, bottom - top].map((n) => Math.round(n * scale));
    if (w < 1 || h < 1) return 99;
    const { data } = context.getImageData(x, y, w, h);
    const [below] = ground(context.canvas);
    const counts = new Map();
    for (let i = 0; i < data.length; i += 4) {
      const key = data.slice(i, i + 4).join();
      counts.set(key, (counts.get(key) || 0) + 1);
    }
    const colour = rgba(String(context.fillStyle));
    return Math.min(...[...counts].filter(([, count]) => count > 0.05 * w * h).map(([key]) => {
      const [r, g, b, a] = key.split(",").map(Number);
      const under = over([r, g, b, a / 255], below);
      return contrast(over(colour, under), under);
    }));
  }

  // ---- faults ------------------------------------------------------------------------------------

  const share = (a, b) => [Math.min(a[2], b[2]) - Math.max(a[0], b[0]), Math.min(a[3], b[3]) - Math.max(a[1], b[1])];
  const meets = (a, b, by = 1) => share(a, b).every((length) => length > by);
  // Whether a line crosses a box.
  function crosses([[x0, y0], [x1, y1]], [l, t, r, b]) {
    let [low, high] = [0, 1];
    for (const [from, by, least, most] of [[x0, x1 - x0, l, r], [y0, y1 - y0, t, b]]) {
      if (by === 0) { if (from <= least || from >= most) return false; continue; }
      const [a, c] = [(least - from) / by, (most - from) / by].sort((p, q) => p - q);
      low = Math.max(low, a);
      high = Math.min(high, c);
    }
    return low < high;
  }
  const short = (text) => text.trim().replace(/\s+/g, " ").slice(0, 40);
  const shown = (element) => element.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true, contentVisibilityAuto: true })
    && !element.closest(".unseen, noscript, script, style, title, option");

  window.drawnOn = (canvas) => drawn.get(canvas);

  window.canvasFaults = () => {
    const faults = [];
    for (const canvas of document.querySelectorAll("canvas")) {
      const { texts = [], lines = [], marks = [] } = drawn.get(canvas) || {};
      texts.forEach((one, i) => {
        if (one.contrast < LEAST) faults.push(`contrast ${one.contrast.toFixed(2)}: "${short(one.text)}" in a picture`);
        const [l, t, r, b] = one.box;
        if (l < -0.5 || t < -0.5 || r > canvas.clientWidth + 0.5 || b > canvas.clientHeight + 0.5) faults.push(`cut: "${short(one.text)}" at a picture's edge`);
        for (const other of texts.slice(i + 1)) if (meets(one.box, other.box)) faults.push(`overlap: "${short(one.text)}" and "${short(other.text)}" in a picture`);
        for (const line of lines) if (crosses(line, one.box)) faults.push(`line through "${short(one.text)}" in a picture`);
        for (const mark of marks) if (meets(one.box, mark, 0)) faults.push(`marker under "${short(one.text)}" in a picture`);
      });
    }
    return faults;
  };

  window.looks = () => {
    const faults = canvasFaults();
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const texts = [];
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      const element = node.parentElement;
      if (!node.data.trim() || !shown(element)) continue;
      const range = document.createRange();
      range.selectNodeContents(node);
      const rects = [...range.getClientRects()].filter((rect) => rect.width > 0 && rect.height > 0);
      if (!rects.length) continue;
      const style = getComputedStyle(element);
      const found = contrastOf(element, style.color);
      if (found < LEAST) faults.push(`contrast ${found.toFixed(2)}: "${short(node.data)}"`);
      // where ancestors cut or scroll
      let floats = false;
      let clip = [-1e9, -1e9, 1e9, 1e9];
      let scrolls = false;
      for (let up = element; up && up !== document.body; up = up.parentElement) {
        const { overflowX, overflowY, position } = getComputedStyle(up);
        floats ||= position === "fixed" || position === "sticky" || up.matches(".tip, .picker div");
        const box = up.getBoundingClientRect();
        const goes = (flow) => flow === "auto" || flow === "scroll";
        scrolls ||= goes(overflowX) && up.scrollWidth > up.clientWidth;
        if (overflowX !== "visible") clip = [Math.max(clip[0], box.left), clip[1], Math.min(clip[2], box.right), clip[3]];
        if (overflowY !== "visible") clip = [clip[0], Math.max(clip[1], box.top), clip[2], Math.min(clip[3], box.bottom)];
      }
      for (const rect of rects) {
        const meant = style.textOverflow === "ellipsis" || element.closest("[data-clipped]");
        if (!scrolls && !meant && (rect.right > Math.min(clip[2], innerWidth) + 1 || rect.left < Math.max(clip[0], 0) - 1)) {
          faults.push(`cut: "${short(node.data)}"`);
        }
        const inner = [rect.left, rect.top + 0.2 * rect.height, rect.right, rect.bottom - 0.2 * rect.height];
        const seen = [Math.max(inner[0], clip[0]), Math.max(inner[1], clip[1]), Math.min(inner[2], clip[2]), Math.min(inner[3], clip[3])];
        if (!floats && seen[0] < seen[2] && seen[1] < seen[3]) texts.push([seen, short(node.data), node]);
      }
    }
    texts.sort(([a], [b]) => a[1] - b[1]);
    texts.forEach(([box, text, node], i) => {
      for (let k = i + 1; k < texts.length && texts[k][0][1] < box[3]; k++) {
        if (node !== texts[k][2] && meets(box, texts[k][0])) faults.push(`overlap: "${text}" and "${texts[k][1]}"`);
      }
    });
    for (const element of document.querySelectorAll("body *")) {
      if (!shown(element)) continue;
      for (const pseudo of ["::before", "::after"]) {
        const style = getComputedStyle(element, pseudo);
        if (!/^"[^"]*\S[^"]*"/.test(style.content)) continue;
        const [r, g, b, a] = rgba(style.color);
        const found = contrastOf(element, `rgba(${r}, ${g}, ${b}, ${a * Number(style.opacity)})`);
        if (found < LEAST) faults.push(`contrast ${found.toFixed(2)}: ${style.content} ${pseudo}`);
      }
      if (element.placeholder) {
        const found = contrastOf(element, getComputedStyle(element, "::placeholder").color);
        if (found < LEAST) faults.push(`contrast ${found.toFixed(2)}: "${short(element.placeholder)}" in an empty field`);
      }
    }
    if (document.documentElement.scrollWidth > innerWidth) faults.push(`wide: the page is ${document.documentElement.scrollWidth} of ${innerWidth} pixels wide`);
    return [...new Set(faults)];
  };

  // The element that has the focus: what it is, and why it could not be told that it has it.
  window.focused = () => {
    const element = document.activeElement;
    if (!element || element === document.body) return null;
    const style = getComputedStyle(element);
    const box = element.getBoundingClientRect();
    const faults = [];
    const ringed = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
    const [below] = ground(element.parentElement);
    if (!ringed && style.boxShadow === "none" && !element.matches("input")) faults.push("no ring");
    else if (ringed && style.outlineStyle !== "auto" && contrast(over(rgba(style.outlineColor), below), below) < 3) faults.push("a faint ring");
    if (box.width && (box.bottom < 0 || box.top > innerHeight)) faults.push("out of sight");
    return { number: [...document.querySelectorAll("*")].indexOf(element), what: `${element.tagName.toLowerCase()} "${short(element.ariaLabel || element.textContent || "")}"`, faults };
  };
})();
