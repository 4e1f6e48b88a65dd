/* Search runs in a worker, which a browser does not start for a page that was opened from a folder. There, this class
   takes the worker's place: a hidden frame of the page runs the same script, and messages go between page and frame. */

class FrameWorker extends EventTarget {
    constructor(url) {
        super()
        this.onmessage = null
        this.frame = document.createElement("iframe")
        this.frame.hidden = true
        document.body.append(this.frame)
        const inside = this.frame.contentWindow
        // What a worker's script finds in its global scope. A frame has to load further scripts one after the other.
        inside.postMessage = data => this.deliver(data)
        inside.importScripts = async (...urls) => {
            for (const each of urls) await FrameWorker.load(inside.document, each)
        }
        this.ready = FrameWorker.load(inside.document, url)
    }

    static load(page, url) {
        return new Promise((loaded, failed) => {
            const script = page.createElement("script")
            script.onload = loaded
            script.onerror = () => failed(new Error(`${url} does not load`))
            script.src = url
            page.body.append(script)
        })
    }

    deliver(data) {
        const message = new MessageEvent("message", {data})
        this.dispatchEvent(message)
        this.onmessage?.(message)
    }

    async postMessage(data) {
        await this.ready
        const inside = this.frame.contentWindow
        inside.dispatchEvent(new inside.MessageEvent("message", {data: structuredClone(data)}))
    }

    terminate() {
        this.frame.remove()
    }
}

if (location.protocol === "file:") window.Worker = FrameWorker
