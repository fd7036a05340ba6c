"use strict";
// The payloads are in the page.
start(async (name) => JSON.parse(document.getElementById(`payload-${name}`).textContent));
