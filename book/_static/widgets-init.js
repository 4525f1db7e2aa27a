// Loaded after require.js and before the widget manager: resolves widget packages in this site.
(() => {
  const script = document.currentScript;
  const manager = new URL(script.dataset.htmlManager + "/", script.src).href;
  const paths = { anywidget: new URL("vendor/anywidget", script.src).href };
  // The modules inside embed-amd.js take the folder of their own address as that of their icon fonts.
  for (const name of ["base", "controls", "output", "html-manager", "html-manager/dist/libembed-amd"])
    paths["@jupyter-widgets/" + name] = manager + name.split("/").pop();
  window.requirejs.config({ paths, waitSeconds: 0 }); // no time limit: slow is not missing

  // ipywidgets asks MathJax 2 to typeset its labels; the pages have MathJax 3, and labels are plain text.
  const withHub = (mathJax) => mathJax && Object.assign(mathJax, { Hub: { Queue() {} } });
  let current = withHub(window.MathJax);
  Object.defineProperty(window, "MathJax", {
    get: () => current,
    set: (value) => (current = withHub(value)),
  });
})();
