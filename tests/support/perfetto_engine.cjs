// Ask Perfetto's own trace processor, the WebAssembly that its user interface runs, about a trace.
//
//     node perfetto_engine.cjs FOLDER TRACE QUERY...     FOLDER: where engine_bundle.js and trace_processor*.wasm lie
//
// Prints a JSON list with the rows of each query. The bundle expects to be a web worker: it gets the little of one that
// it uses, and is spoken to in TraceProcessorRpc (protobuf; field numbers as in trace_processor.proto) over a port.
"use strict";
const fs = require("node:fs");
const path = require("node:path");
const vm = require("node:vm");

const [folder, trace, ...queries] = process.argv.slice(2);
const Method = { APPEND: 1, FINALIZE: 2, QUERY: 3 };
const Rpc = { MESSAGE: 1, SEQUENCE: 1, METHOD: 2, TRACE_DATA: 101, QUERY: 103, APPENDED: 201, RESULT: 203 };
const Cell = { VARINT: 2, FLOAT64: 3, STRING: 4 };

// -- protobuf ----------------------------------------------------------------------------------------------------

function varint(value) {
    const bytes = [];
    for (; value > 127; value = Math.floor(value / 128)) bytes.push(value % 128 + 128);
    return Buffer.from([...bytes, value]);
}

const number = (field, value) => Buffer.concat([varint(field * 8), varint(value)]);
const bytes = (field, data) => Buffer.concat([varint(field * 8 + 2), varint(data.length), data]);

class Reader {
    constructor(data) { this.data = data; this.at = 0; }
    get more() { return this.at < this.data.length; }
    varint() {
        let value = 0n;
        for (let shift = 0n; ; shift += 7n) {
            const byte = this.data[this.at++];
            value |= BigInt(byte & 127) << shift;
            if (byte < 128) return Number(BigInt.asIntN(64, value));
        }
    }
    take(length) { this.at += length; return this.data.subarray(this.at - length, this.at); }
    field() {
        const tag = this.varint(), kind = tag & 7;
        if (kind === 0) return [tag >> 3, this.varint()];
        if (kind === 1) return [tag >> 3, this.take(8)];
        if (kind === 2) return [tag >> 3, this.take(this.varint())];
        throw new Error(`field ${tag >> 3} has wire type ${kind}`);
    }
}

function all(data, wanted) {
    const found = [];
    for (const reader = new Reader(data); reader.more;) {
        const [field, value] = reader.field();
        if (field === wanted) found.push(value);
    }
    return found;
}

function packed(data) {
    const found = [];
    for (const reader = new Reader(data); reader.more;) found.push(reader.varint());
    return found;
}

function refuse(where, errors) {
    for (const error of errors) if (error.length) throw new Error(`${where}: ${error}`);
}

// -- the engine, in a world of its own: its errors must be instances of the classes that it sees ---------------------

const worker = {
    console: { log() {}, warn() {}, assert() {}, error: console.error },
    TextDecoder, TextEncoder, setTimeout, clearTimeout, queueMicrotask, performance, URL, crypto: globalThis.crypto,
    location: { href: "https://localhost/engine_bundle.js", origin: "https://localhost" },
    WorkerGlobalScope: class {}, navigator: { userAgent: "node" }, importScripts() {}, addEventListener() {},
    XMLHttpRequest: class {
        open(method, name) { this.name = path.basename(name); }
        send() {
            const data = fs.readFileSync(path.join(folder, this.name));
            this.status = 200;
            this.response = data.buffer.slice(data.byteOffset, data.byteOffset + data.length);
        }
    },
};
worker.self = worker;
vm.runInContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"), vm.createContext(worker));
const ofItsKind = vm.runInContext("data => new Uint8Array(data)", worker);

let replies = [], sequence = 0;
const port = { postMessage(data) { replies.push(Buffer.from(data)); } };

function ask(method, ...parts) {
    replies = [];
    const message = Buffer.concat([number(Rpc.SEQUENCE, sequence++), number(Rpc.METHOD, method), ...parts]);
    port.onmessage({ data: ofItsKind(bytes(Rpc.MESSAGE, message)) });
    return all(Buffer.concat(replies), Rpc.MESSAGE);
}

function rows(sql) {
    const cells = [];
    let columns = 0;
    for (const reply of ask(Method.QUERY, bytes(Rpc.QUERY, bytes(1, Buffer.from(sql)))))
        for (const result of all(reply, Rpc.RESULT)) {
            refuse(sql, all(result, 2));
            columns ||= all(result, 1).length;
            for (const batch of all(result, 3)) {
                const integers = all(batch, 2).flatMap(packed);
                const floats = all(batch, 3).flatMap(data =>
                    Array.from({ length: data.length / 8 }, (_, i) => data.readDoubleLE(8 * i)));
                const texts = all(batch, 5).flatMap(data => String(data).split("\0"));
                const values = { [Cell.VARINT]: integers, [Cell.FLOAT64]: floats, [Cell.STRING]: texts };
                for (const kind of all(batch, 1).flatMap(packed)) cells.push(kind in values ? values[kind].shift() : null);
            }
        }
    return Array.from({ length: cells.length / columns }, (_, i) => cells.slice(i * columns, (i + 1) * columns));
}

setImmediate(() => {  // the module was made at once, and is told so in a promise
    worker.onmessage({ data: port });
    for (const reply of ask(Method.APPEND, bytes(Rpc.TRACE_DATA, fs.readFileSync(trace))))
        for (const result of all(reply, Rpc.APPENDED)) refuse(trace, all(result, 2));
    ask(Method.FINALIZE);
    console.log(JSON.stringify(queries.map(rows)));
});
