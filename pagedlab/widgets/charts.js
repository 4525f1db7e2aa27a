(async () => {
  const figure = document.getElementById("ID");
  const plot = figure.querySelector(".plotly-graph-div");
  const { data, layout, frames } = JSON.parse(figure.querySelector("script[type='application/json']").textContent);
  if (!window.Plotly)
    await new Promise((done, failed) => {
      const define = window.define; // plotly would hand itself to require.js instead of to the page
      window.define = undefined;
      const script = document.createElement("script");
      script.src = "https://cdn.plot.ly/plotly-VERSION.min.js";
      script.onload = script.onerror = () => {
        window.define = define;
        if (window.Plotly) done();
        else plot.textContent = "This chart needs plotly.js, which could not be loaded.";
      };
      document.head.append(script);
    });
  const colours = () => {
    const style = getComputedStyle(figure);
    const [ink, line] = ["--pl-ink", "--pl-line"].map((name) => style.getPropertyValue(name).trim());
    const all = { "font.color": ink };
    for (const axis of Object.keys(layout).filter((key) => /^[xy]axis/.test(key)).concat("xaxis", "yaxis"))
      for (const part of ["gridcolor", "linecolor", "zerolinecolor"]) all[`${axis}.${part}`] = line;
    return all;
  };
  await Plotly.newPlot(plot, data, layout, { responsive: true, displayModeBar: false });
  await Plotly.relayout(plot, colours());
  const watch = new MutationObserver(() => plot.isConnected && Plotly.relayout(plot, colours()));
  for (const element of [document.documentElement, document.body])
    watch.observe(element, { attributeFilter: ["data-theme", "theme", "data-jp-theme-light", "class"] });
  if (!frames.length) return;
  const [range, output] = [figure.querySelector("input"), figure.querySelector("output")];
  const show = async () => {
    const frame = frames[range.value];
    output.textContent = frame.name;
    range.setAttribute("aria-valuetext", frame.name);
    await Plotly.animate(plot, { data: frame.data }, { mode: "immediate", transition: { duration: 0 }, frame: { duration: 0, redraw: true } });
  };
  range.addEventListener("input", show);
  await show();
})();
