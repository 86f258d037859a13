// The search runs in a worker, which browsers refuse to pages that are opened as files. There an invisible frame takes
// its place: a script in it is given what a worker has (postMessage, addEventListener, importScripts).
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe"), waiting = [];
      frame.hidden = true;
      document.documentElement.append(frame);
      const inner = frame.contentWindow;
      this.inner = inner;
      const listeners = [];
      inner.addEventListener = (type, listener) => type === "message" ? listeners.push(listener) : undefined;
      inner.postMessage = data => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        this.onmessage?.(event);
      };
      const load = source => new Promise((done, failed) => {
        const script = inner.document.createElement("script");
        Object.assign(script, { src: source, onload: done, onerror: failed });
        inner.document.head.append(script);
      });
      inner.importScripts = (...sources) => sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      this.deliver = data => listeners.length || inner.onmessage
        ? [...listeners, inner.onmessage].filter(Boolean).forEach(listener => listener.call(inner, new MessageEvent("message", { data })))
        : waiting.push(data);
      load(url).then(() => waiting.splice(0).forEach(this.deliver));
    }
    postMessage(data) { setTimeout(() => this.deliver(data)); }
    terminate() { this.inner.frameElement.remove(); }
  };
}
