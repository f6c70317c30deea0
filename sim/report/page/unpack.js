// Data of the page: base64, deflate, JSON; columns of differences added up.

async function unpack(text) {
  const letters = atob(text);
  const packed = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) packed[i] = letters.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

async function part(name) {
  for (const block of document.querySelectorAll("script[data-part]")) {
    if (block.dataset.part === name) return unpack(block.textContent);
  }
  return null;
}

function summed(steps, Kind = Float64Array) {
  const out = new Kind(steps.length);
  let value = 0;
  for (let i = 0; i < steps.length; i++) out[i] = value += steps[i];
  return out;
}

// Intervals of each track, in order of start: rows first..last of the columns.
function unpackLanes(lanes) {
  const { gap, length } = lanes;
  const start = new Float64Array(gap.length);
  const end = new Float64Array(gap.length);
  const tracks = [];
  let at = 0;
  for (const [name, group, main, count, route] of lanes.tracks) {
    const first = at;
    for (let now = 0; at < first + count; at++) {
      start[at] = now + gap[at];
      now = end[at] = start[at] + length[at];
    }
    tracks.push({ name, group, main, first, last: at, route });
  }
  return {
    tracks,
    groups: lanes.groups,
    start,
    end,
    why: Uint8Array.from(lanes.why),
    cause: Uint8Array.from(lanes.cause),
    device: Int32Array.from(lanes.device),
    op: summed(lanes.op, Int32Array),
    tensor: summed(lanes.tensor, Int32Array),
    bytes: Float64Array.from(lanes.bytes),
  };
}

// Bytes of each role in a tier after every change that draws the level: the last one of each nanosecond, and the
// highest one where it is higher. So what is released and taken again at once makes no dip.
function unpackTier(tier, tensors, roles) {
  const time = summed(tier.time);
  const tensor = summed(tier.tensor, Int32Array);
  const count = time.length;
  const held = new Float64Array(roles.length + 1); // the last one is scratch space
  const present = new Array(held.length).fill(false);
  // each nanosecond draws at most two points
  const times = new Float64Array(2 * count);
  const totals = new Float64Array(2 * count);
  const levels = Array.from(held, () => new Float64Array(2 * count));
  const top = new Float64Array(held.length);
  let points = 0;
  let total = 0;
  const keep = (when, level, from) => {
    times[points] = when;
    totals[points] = level;
    for (let r = 0; r < from.length; r++) levels[r][points] = from[r];
    points += 1;
  };
  for (let i = 0; i < count; ) {
    const when = time[i];
    let most = -1;
    for (; i < count && time[i] === when; i++) {
      const role = tensor[i] < 0 ? roles.length : tensors.role[tensor[i]];
      held[role] += tier.delta[i];
      total += tier.delta[i];
      present[role] = true;
      if (total > most) {
        most = total;
        top.set(held);
      }
    }
    if (most > total) keep(when, most, top);
    keep(when, total, held);
  }
  return {
    ...tier,
    time,
    tensor,
    times: times.subarray(0, points),
    totals: totals.subarray(0, points),
    levels: levels.map((level) => level.subarray(0, points)),
    present,
  };
}

// Position of the last entry that is at most value; -1 where there is none.
function atOrBefore(sorted, value, low = 0, high = sorted.length) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

// Position of the first entry above value.
const after = (sorted, value, low, high) => atOrBefore(sorted, value, low, high) + 1;

// What a tier holds after its first `upto` changes: [tensor, bytes]; scratch space is under -1.
function holders(tier, upto, tensors) {
  const held = new Float64Array(tensors.name.length + 1); // the first one is scratch space
  for (let i = 0; i < upto; i++) held[tier.tensor[i] + 1] += tier.delta[i];
  const found = [];
  for (let i = 0; i < held.length; i++) if (held[i] > 0) found.push([i - 1, held[i]]);
  return found;
}
