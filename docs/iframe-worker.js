// Search from a folder: browsers start no worker for a page that was opened as a file, so that the search of the theme
// stays empty there. Its script runs in a hidden frame instead. Served pages keep their worker.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.title = "search"
      this.frame = new Promise((resolve) => {
        frame.addEventListener("load", () => resolve(this.begun(frame.contentWindow, url)), { once: true })
      })
      frame.srcdoc = "<!doctype html><title>search</title>"
      document.body.append(frame)
    }

    // What a worker's script finds around it; a script that it imports is awaited there.
    begun(inside, url) {
      const load = (from) =>
        new Promise((resolve, reject) => {
          const script = inside.document.createElement("script")
          script.addEventListener("load", resolve)
          script.addEventListener("error", reject)
          script.src = new URL(from, document.baseURI)
          inside.document.head.append(script)
        })
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = (...all) => all.reduce((before, next) => before.then(() => load(next)), Promise.resolve())
      return load(url).then(() => inside)
    }

    postMessage(data) {
      this.frame.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}

// The language of queries takes a leading dash for "without this word": an option is found with its dashes, too.
const QUERY = 2
const send = window.Worker.prototype.postMessage
window.Worker.prototype.postMessage = function (message, ...rest) {
  const isQuery = message?.type === QUERY && typeof message.data === "string"
  return send.call(this, isQuery ? { ...message, data: message.data.replace(/(^|\s)--+(?=\w)/g, "$1") } : message, ...rest)
}
