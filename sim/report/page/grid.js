// Tables that sort: a button in each heading, aria-sort, rows added as one asks for them.

const PAGE = 100;
const collator = new Intl.Collator("en", { numeric: true });

// columns: {title, kind, value(row), cell(row) or nothing, hint, sorts: false where an order of its values would say nothing}; rows: anything. Returns {root, show(rows), filter}.
function grid({ columns, rows, caption, sort = null, page = PAGE, rowHeader = 0, onRow = null }) {
  let all = rows;
  let shown = page;
  let order = sort; // {column, down}
  const body = el("tbody");
  const more = el("button", { type: "button", class: "more", onclick: () => { shown += 5 * page; fill(); } });
  const heads = columns.map((column, number) => {
    const button = el("button", { type: "button", title: column.hint || null, onclick: () => choose(number) },
      column.title, el("span", { class: "arrow", "aria-hidden": "true" }));
    if (column.sorts === false) return el("th", { scope: "col", class: "plain" }, column.title);
    return el("th", { scope: "col", class: numeric(column) ? "right" : null, "aria-sort": "none" }, button);
  });
  const table = el("table", {}, el("caption", { class: "unseen" }, caption),
    el("thead", {}, el("tr", {}, heads)), body);
  const root = el("div", { class: "grid" },
    el("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": caption }, table), more);

  function numeric(column) {
    return column.kind && column.kind !== "text" && column.kind !== "flag";
  }

  function choose(number) {
    const first = numeric(columns[number]) ? columns[number].down !== false : false;
    order = { column: number, down: order && order.column === number ? !order.down : first };
    fill();
  }

  function sorted() {
    if (!order) return all;
    const { value } = columns[order.column];
    const side = order.down ? -1 : 1;
    const keyed = all.map((row, place) => [value(row), place, row]);
    keyed.sort(([a, i], [b, j]) => {
      const left = a === null || a === undefined || a === "";
      const right = b === null || b === undefined || b === "";
      if (left || right) return left - right || i - j; // what is not known comes last either way
      const less = typeof a === "string" ? collator.compare(a, String(b)) : a - b;
      return side * less || i - j;
    });
    return keyed.map(([, , row]) => row);
  }

  function fill() {
    heads.forEach((head, number) => {
      if (columns[number].sorts === false) return;
      const mine = order && order.column === number;
      head.setAttribute("aria-sort", mine ? (order.down ? "descending" : "ascending") : "none");
    });
    const some = sorted().slice(0, shown);
    body.replaceChildren(...some.map((row) => {
      const cells = columns.map((column, number) => {
        const content = column.cell ? column.cell(row) : valueText(column.value(row), column.kind);
        const attributes = { class: numeric(column) ? "right" : null };
        return number === rowHeader ? el("th", { scope: "row", ...attributes }, content) : el("td", attributes, content);
      });
      const line = el("tr", {}, cells);
      if (onRow) onRow(line, row);
      return line;
    }));
    const left = all.length - some.length;
    more.hidden = left <= 0;
    more.textContent = `${numberText(left)} more: show ${numberText(Math.min(left, 5 * page))}`;
  }

  fill();
  return { root, show(next) { all = next; shown = page; fill(); } };
}
