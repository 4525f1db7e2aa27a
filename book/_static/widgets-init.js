// Loaded after require.js and before the widget manager: resolves widget packages in this site.
(() => {
  const script = document.currentScript;
  const manager = new URL(script.dataset.htmlManager + "/", script.src).href;
  const paths = { anywidget: new URL("vendor/anywidget", script.src).href };
  // The modules inside embed-amd.js take the folder of their own address as that of their icon fonts.
  for (const name of ["base", "controls", "output", "html-manager", "html-manager/dist/libembed-amd"])
    paths["@jupyter-widgets/" + name] = manager + name.split("/").pop();
  window.requirejs.config({ paths });
  // ipywidgets hands its labels to MathJax 2's queue, which the site's MathJax 3 has not.
  let mathjax;
  const withQueue = (value) => (mathjax = value && Object.assign(value, { Hub: { Queue() {} } }));
  withQueue(window.MathJax);
  Object.defineProperty(window, "MathJax", { get: () => mathjax, set: withQueue });
})();
