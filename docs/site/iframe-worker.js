// Search without a network: browsers start no Worker from file://, so its script runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.scope = new Promise(resolve => frame.addEventListener("load", () => {
        const scope = frame.contentWindow, script = scope.document.createElement("script")
        scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}))
        script.src = url
        script.onload = () => resolve(scope)
        scope.document.head.append(script)
      }))
      frame.srcdoc = "<!doctype html>"
      document.body.append(frame)
    }

    postMessage(data) {
      this.scope.then(scope => scope.dispatchEvent(new scope.MessageEvent("message", {data})))
    }
  }
}
