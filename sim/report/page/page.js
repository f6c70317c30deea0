// Puts the page together, and goes from the table to a run and back.

// Call back when an element has a place on the page, and so a width.
const waiting = new Map();
function whenShown(element, then) { waiting.set(element, then); }

// A link within a page whose address already says which run is shown.
function goTo(event) {
  event.preventDefault();
  const target = document.getElementById(event.currentTarget.getAttribute("href").slice(1));
  if (target) target.scrollIntoView();
}

const main = document.getElementById("page");

function put(parts) {
  main.replaceChildren(...parts.filter(Boolean));
  for (const [element, then] of waiting) if (element.isConnected) then();
  waiting.clear();
}

async function show(about, table) {
  tellNothing();
  main.setAttribute("aria-busy", "true");
  const asked = /^#run=(.+)$/.exec(location.hash);
  if (!table) put(runPage(await part("run"), about.colours));
  else if (asked) {
    const id = decodeURIComponent(asked[1]);
    put(rowPage(table, id, about.runs.includes(id) ? await part(`run ${id}`) : null, about.colours));
  } else put(tablePage(table, about, about.colours));
  main.setAttribute("aria-busy", "false");
  performance.mark("drawn");
}

async function begin() {
  document.body.append(tip);
  const about = await part("about");
  const table = about.kind === "table" ? await part("table") : null;
  await show(about, table);
  if (table) {
    let scrolled = 0;
    addEventListener("hashchange", async (event) => {
      if (!/^#(run=.+)?$/.test(location.hash || "#")) return;
      if (!event.oldURL.includes("#run=")) scrolled = scrollY;
      await show(about, table);
      scrollTo(0, location.hash.startsWith("#run=") ? 0 : scrolled);
    });
  }
}

begin().catch((error) => {
  main.replaceChildren(el("p", { class: "loading" }, `This page cannot be drawn: ${error.message}`));
  throw error;
});
