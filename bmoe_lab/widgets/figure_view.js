// A plotly figure on the page. The kernel sends whole figures, their arrays as binary; the page
// answers with what was clicked, which part is in view, and which part was selected.

// One copy of plotly.js per page, whatever the number of figures: it is 5 MB.
const libraries = new Map();

async function plotlyOf(model) {
  const id = model.get("library").replace("IPY_MODEL_", "");
  const library = await model.widget_manager.get_model(id);
  const version = library.get("version");
  if (!libraries.has(version)) {
    const source = library.get("source");
    // As a module of its own, so that no global of the page is replaced.
    const parts = [
      "const module = {exports: {}}; const exports = module.exports;\n",
      source,
      "\nexport default module.exports;",
    ];
    const url = URL.createObjectURL(new Blob(parts, { type: "text/javascript" }));
    libraries.set(
      version,
      import(/* webpackIgnore: true */ url)
        .then((loaded) => loaded.default)
        .finally(() => URL.revokeObjectURL(url)),
    );
  }
  return libraries.get(version);
}

const TYPES = {
  i1: Int8Array,
  u1: Uint8Array,
  i2: Int16Array,
  u2: Uint16Array,
  i4: Int32Array,
  u4: Uint32Array,
  f4: Float32Array,
  f8: Float64Array,
};

// Bytes with a dtype become typed arrays; those of two dimensions one array per row.
function unpacked(value) {
  if (Array.isArray(value)) return value.map(unpacked);
  if (value === null || typeof value !== "object") return value;
  if (value.bdata !== undefined && value.dtype !== undefined) {
    const view = value.bdata;
    // A copy: what arrives need not be aligned.
    const bytes = view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);
    const flat = new TYPES[value.dtype](bytes);
    const shape = String(value.shape ?? flat.length).split(",").map(Number);
    if (shape.length === 1) return flat;
    return nested(flat, shape);
  }
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, unpacked(item)]));
}

function nested(flat, shape) {
  if (shape.length === 1) return flat;
  const [n, ...rest] = shape;
  const size = rest.reduce((a, b) => a * b, 1);
  return Array.from({ length: n }, (_, i) => nested(flat.subarray(i * size, (i + 1) * size), rest));
}

// The ranges of the axes that a relayout names; null where an axis was reset.
function ranges(change) {
  const found = {};
  for (const [key, value] of Object.entries(change)) {
    let match;
    if ((match = key.match(/^([xy]axis\d*)\.range$/))) found[match[1]] = value.map(Number);
    else if ((match = key.match(/^([xy]axis\d*)\.range\[([01])\]$/))) {
      found[match[1]] ??= [];
      found[match[1]][Number(match[2])] = Number(value);
    } else if ((match = key.match(/^([xy]axis\d*)\.autorange$/)) && value) found[match[1]] = null;
  }
  return found;
}

// What goes back to the kernel is JSON: typed arrays would arrive there as objects.
function plain(value) {
  if (value === undefined) return null;
  return ArrayBuffer.isView(value) ? Array.from(value) : value;
}

function render({ model, el }) {
  el.classList.add("bmoe-figure");
  const place = document.createElement("div");
  place.style.width = "100%";
  const note = document.createElement("div");
  note.setAttribute("role", "alert");
  el.append(place, note);
  let closed = false;
  let drawing = null;
  let stale = false;
  let listening = false;
  let n_event = 0;

  const tell = (name, value) => {
    n_event += 1;
    model.set(name, { ...value, event: n_event });
    model.save_changes();
  };

  const listen = () => {
    listening = true;
    place.on("plotly_click", ({ points }) => {
      const [point] = points;
      const index = point.pointIndex ?? point.pointNumber;
      tell("clicked", {
        curve: point.curveNumber,
        index: Array.isArray(index) ? index : [index],
        x: point.x,
        y: point.y,
        data: plain(point.customdata),
      });
    });
    place.on("plotly_relayout", (change) => {
      const found = ranges(change);
      if (Object.keys(found).length) tell("view", { ...lastView(), ...found });
    });
    place.on("plotly_selected", (event) => tell("selected", event?.range ?? {}));
    place.on("plotly_deselect", () => tell("selected", {}));
  };

  const lastView = () => {
    const { event, ...axes } = model.get("view");
    return axes;
  };

  const draw = async () => {
    // One drawing at a time; what came meanwhile is drawn once, in its latest state.
    if (drawing) {
      stale = true;
      return drawing;
    }
    drawing = (async () => {
      do {
        stale = false;
        const version = model.get("version");
        el.dataset.shown = version;
        try {
          const { data, layout, config } = unpacked(model.get("figure"));
          if (!data) {
            // Nothing to show yet is shown too.
            el.dataset.drawn = version;
            break;
          }
          const Plotly = await plotlyOf(model);
          if (closed) return;
          await Plotly.react(place, data, { ...layout, autosize: layout.width === undefined }, config);
          if (closed) return;
          if (!listening) listen();
          note.textContent = "";
          const title = layout.title?.text;
          if (title) place.setAttribute("aria-label", title.replace(/<[^>]*>/g, ""));
          place.setAttribute("role", "figure");
          await new Promise(requestAnimationFrame);
          el.dataset.drawn = version;
        } catch (error) {
          note.textContent = `This figure could not be drawn: ${error.message}`;
        }
      } while (stale && !closed);
    })();
    try {
      await drawing;
    } finally {
      drawing = null;
    }
  };

  const resized = new ResizeObserver(async () => {
    if (!listening || closed || !place.clientWidth) return;
    const Plotly = await plotlyOf(model);
    if (!closed) Plotly.Plots.resize(place);
  });
  resized.observe(el);

  model.on("change:version", draw);
  draw();

  return async () => {
    closed = true;
    resized.disconnect();
    model.off("change:version", draw);
    if (listening) (await plotlyOf(model)).purge(place);
  };
}

export default { render };
