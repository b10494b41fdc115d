/* What test_browser.py measures in the page. It runs in the page and may use its names. */

/* Elements that reach out of what they stand in: a list of what and where. */
const clipped = () => {
    const width = document.documentElement.clientWidth, found = [];
    const note = (what, element) => found.push(`${what}: ${element.tagName} ${element.id} "${element.textContent.trim().slice(0, 40)}"`);
    for (const element of document.querySelectorAll("body *")) {
        if (element.closest("script, style, [hidden], #range input") || !element.getClientRects().length) continue;
        const box = element.getBoundingClientRect();
        if (box.left < -.5 || box.right > width + .5) note("beyond the page", element);
        if (element instanceof HTMLElement && element.scrollWidth > element.clientWidth + 1 && element.clientWidth) note("wider than its box", element);
        const card = element.closest(".card, header");
        if (card && card !== element) {
            const outer = card.getBoundingClientRect();
            if (box.left < outer.left - .5 || box.right > outer.right + .5 || box.bottom > outer.bottom + .5) note("beyond its card", element);
        }
        if (element.tagName === "text") {
            const chart = element.ownerSVGElement.getBoundingClientRect();
            if (box.left < chart.left - .5 || box.right > chart.right + .5 || box.top < chart.top - 1 || box.bottom > chart.bottom + 1) note("beyond its chart", element);
        }
    }
    return found;
};

/* Pairs of words that lie on one another. */
const overlapping = () => {
    const words = [...document.querySelectorAll("dt, .tiles dd, #facts dd, th, td, .legend li, h2, p, #range label, svg text")]
        .filter(one => one.getClientRects().length && one.textContent.trim());
    const boxes = words.map(word => word.getBoundingClientRect()), found = [];
    for (let i = 0; i < words.length; i++) for (let j = i + 1; j < words.length; j++) {
        const [a, b] = [boxes[i], boxes[j]];
        const over = Math.min(a.right, b.right) - Math.max(a.left, b.left), down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (over > 1 && down > 3) found.push(`${words[i].textContent} / ${words[j].textContent}`);
    }
    return found;
};

/* A look with long values, as a large cluster in trouble would give it. */
const large = answer => {
    const pool = answer.stats.pool, cells = "0123".repeat(512);
    const causes = ["RequestError", "HistoryUnavailable", "Service Unavailable", "Unsupported Media Type", "SomethingNobodyHasHeardOf"];
    Object.assign(answer, { model: "a-model-with-quite-a-long-name-v12", device: "NVIDIA H200 and NVIDIA GH200 480GB", num_restarts: 3 });
    Object.assign(pool, { num_pages: 5242880, free_pages: 1310720, emb_pages: 1310720, kv_pages: 1310720, draining_pages: 1310720, resident_rows: 987654321, row_capacity: 1234567890, alpha: .987, alpha_target: .013, resident_users: 12345678, host_pages: 1234567, leases: 123456 });
    pool.bytes_by_cause = Object.fromEntries(["row-miss", "row-refill", "kv-save", "kv-reload", "boundary-grow", "boundary-compact"].map((cause, i) => [cause, 2 ** (10 * i)]));
    Object.assign(answer.stats, { queue_length: 123456, audits: 123456789, audit_mismatches: 1234 });
    answer.stats.pauses = { ...answer.stats.pauses, recent_ms: 12345.6, recent_cause: "boundary move" };
    answer.errors = Object.fromEntries(causes.map(cause => [cause, 123456789]));
    answer.recent = { ...answer.recent, rate: 123456, refused_rate: 12345, p50_ms: 12345, p99_ms: 123456, slo_share: .123, errors: answer.errors };
    answer.pages = { cells, pages_per_cell: 2560 };
    answer.replicas = Object.fromEntries(["0kv5eyl2", "abcdefgh", "zyxwvuts"].map(name => [name, { alpha: .5, queue_length: 123456, served: 123456789, refused: 0, row_hit_rate: .5, token_reuse_rate: 1 }]));
    const layer = name => ({ name, alpha: .5, note: "predicts 12345.67 ms there, 12345.67 ms here" });
    answer.control = { policy: "static:0.123456", mode: "adaptive", asked_alpha: .5, reason: "burst recovery: predicts 1.00 ms there", expected_gain_ms: 1234.5, measured_ms: 12345, predicted_ms: 1234,
        last_move: "0.400 -> 0.500 by burst recovery, +1234.310 ms of stage time per request predicted, not known yet", layers: ["base", "residual", "burst recovery"].map(layer),
        moves: [1, 2, 3, 4, 5].map(i => ({ time_s: Date.now() / 1e3 - 1e5 * i, start_alpha: .1, alpha: .9, reason: "burst recovery: predicts 1.00 ms there" })) };
    return answer;
};

/* Show such a look, and ask the server no more. */
const showLarge = () => { clearTimeout(timer); round++; show(large(lastAnswer)); };

/* The least contrast of words against what they stand on. */
const contrast = () => {
    const channels = colour => colour.match(/[\d.]+/g).map(Number).slice(0, 3).map(c => c / 255 <= .04045 ? c / 255 / 12.92 : ((c / 255 + .055) / 1.055) ** 2.4);
    const light = colour => { const [r, g, b] = channels(colour); return .2126 * r + .7152 * g + .0722 * b; };
    const ratio = (a, b) => (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    const probe = document.createElement("span");
    document.body.append(probe);
    const of = name => { probe.style.color = `var(${name})`; return light(getComputedStyle(probe).color); };
    const worst = Math.min(...["--ink", "--soft", "--alarm", "--good"].flatMap(ink => ["--card", "--ground"].map(on => ratio(of(ink), of(on)))));
    probe.remove();
    return worst;
};

/* Let the server answer a quarter of an hour of samples. */
const answerOldSamples = () => {
    const made = Array.from({ length: 900 }, (_, i) => ({ ...samples[samples.length - 1], number: i - 899, time_s: Date.now() / 1e3 - 900 + i }));
    clearTimeout(timer); round++;
    window.fetch = async address => { window.asked = address; return { ok: true, json: async () => ({ ...lastAnswer, samples: made }) }; };
};
