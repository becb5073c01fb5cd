#!/usr/bin/env python3
"""Schemas of others against `nq serve demo`: which are taken, what they cost, whether answers hold to them.

    benches/json_schemas.py target/release/nq FOLDER > record.csv

FOLDER holds JSONSchemaBench's `data`, or any folders of schemas (a file with the keys `schema` and
`tests` is taken for its schema). Every schema is sent for an answer of 8 tokens: it is taken, or refused
with a reason, for less than two seconds of the process's time each. Then 1,000 answers at temperature 1 under 20 schemas whose
keywords differ must hold to them by the package `jsonschema`, and their time per token is set beside
that of answers without a schema.
"""

import argparse
import collections
import concurrent.futures
import http.client
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import threading
import time

import jsonschema

CHAT = "/v1/chat/completions"
LONGEST = 300
local = threading.local()


def ask(address, asked):
    """Status, body and seconds of one request."""
    begun = time.perf_counter()
    for again in (True, False):
        try:
            if getattr(local, "connection", None) is None:
                local.connection = http.client.HTTPConnection(*address, timeout=300)
            local.connection.request("POST", CHAT, json.dumps(asked), {"content-type": "application/json"})
            response = local.connection.getresponse()
            return response.status, json.loads(response.read()), time.perf_counter() - begun
        except (OSError, http.client.HTTPException):
            local.connection = None
            if not again:
                raise


def body(schema, seed=1, max_tokens=8):
    format = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": "Write JSON."}],
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "seed": seed,
    } | ({"response_format": format} if schema is not None else {})


def read(folder):
    """(set, name, schema) of every file."""
    for path in sorted(folder.rglob("*.json")):
        schema = json.loads(path.read_text())
        if isinstance(schema, dict) and {"schema", "tests"} <= schema.keys():
            schema = schema["schema"]
        kind = path.parent.name if path.parent != folder else re.split(r"---|_\d", path.stem)[0]
        yield kind, path.name, schema


def reason(message):
    """What a refusal is about, without what is particular to one schema."""
    message = re.sub(r"^response_format: |^.*?: (?=Unimplemented|Unsupported|failed)", "", message)
    message = re.sub(r"json-schema:\S+", "..", message).replace('"', "'")
    return re.sub(r"\d+", "N", message)[:160]


def keywords(schema, found=None):
    found = set() if found is None else found
    if isinstance(schema, dict):
        found.update(k for k in schema if k in WATCHED)
        for value in schema.values():
            keywords(value, found)
    elif isinstance(schema, list):
        for value in schema:
            keywords(value, found)
    return found


WATCHED = (
    "anyOf oneOf allOf enum const pattern format minimum maximum exclusiveMinimum multipleOf minLength maxLength "
    "minItems maxItems $ref additionalProperties patternProperties prefixItems required items"
).split()


def spent(pid):
    """Seconds of processors that a process has taken."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"^VmRSS:\s+(\d+)", status, re.M)[1]) / 1024


def parse_all(address, pid, schemas, out):
    results = []
    memory = [rss(pid)]

    for kind, name, schema in schemas:
        before = spent(pid)
        status, answer, _ = ask(address, body(schema))
        why = "" if status == 200 else answer["error"]["message"]
        results.append((kind, name, status, why, spent(pid) - before))
        if len(results) % 100 == 0:
            memory.append(rss(pid))
            print(len(results), f"{memory[-1]:.0f} MiB", file=sys.stderr)
    out.write("set,schemas,taken,refused,cpu_ms_p50,cpu_ms_p99,cpu_ms_most\n")
    kinds = collections.defaultdict(list)
    for r in results:
        kinds[r[0]].append(r)
        kinds["all"].append(r)
    for kind, rows in sorted(kinds.items(), key=lambda k: (k[0] == "all", k[0])):
        taken = sum(r[2] == 200 for r in rows)
        times = sorted(1e3 * r[4] for r in rows)
        p99 = times[int(0.99 * len(times))]
        print(f"{kind},{len(rows)},{taken},{len(rows) - taken},{statistics.median(times):.0f},{p99:.0f},{times[-1]:.0f}", file=out)
    print(f"# memory of the process: {memory[0]:.0f} MiB before, {max(memory):.0f} at most, {memory[-1]:.0f} after", file=out)
    print("status,refused_for,schemas,for_example", file=out)
    why = collections.defaultdict(list)
    for r in results:
        if r[2] != 200:
            why[r[2], reason(r[3])].append(r[1])
    for (status, text), names in sorted(why.items(), key=lambda w: -len(w[1])):
        print(f"{status},\"{text}\",{len(names)},{names[0]}", file=out)
    out.flush()
    return results


def choose(address, schemas, results, n):
    """`n` schemas that were taken and whose answers end, each with the most keywords that few before have."""
    taken = {(r[0], r[1]) for r in results if r[2] == 200}
    small = [s for s in schemas if (s[0], s[1]) in taken and len(json.dumps(s[2])) < 3000]
    random.Random(1).shuffle(small)
    chosen, seen = [], collections.Counter()
    while small and len(chosen) < n:
        best = max(small, key=lambda s: sum(1 / (1 + seen[k]) ** 2 for k in keywords(s[2])))
        small.remove(best)
        probes = [ask(address, body(best[2], seed, LONGEST))[1]["choices"][0] for seed in (-1, -2)]
        if any(p["finish_reason"] == "length" for p in probes):
            continue
        chosen.append(best)
        seen.update(keywords(best[2]))
    return chosen


def sample(address, pid, chosen, each, out):
    """Answers under the schemas; seconds of processors and tokens of all."""
    total = [0.0, 0]
    print("schema,keywords,answers,valid,cut_off", file=out)
    wrong = []
    for kind, name, schema in chosen:
        validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
        valid = cut = whole = 0
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            begun = spent(pid)
            answers = list(pool.map(lambda seed: ask(address, body(schema, seed, LONGEST)), range(each)))
            total[0] += spent(pid) - begun
        for status, answer, _ in answers:
            assert status == 200, (name, answer)
            total[1] += answer["usage"]["completion_tokens"]
            choice = answer["choices"][0]
            if choice["finish_reason"] == "length":
                cut += 1
                continue
            whole += 1
            try:
                problems = list(validator.iter_errors(json.loads(choice["message"]["content"])))
            except ValueError as e:
                problems = [e]
            valid += not problems
            if problems:
                wrong.append((name, choice["message"]["content"][:300], str(problems[0])[:200]))
        print(f"{kind}/{name},{' '.join(sorted(keywords(schema)))},{whole},{valid},{cut}", file=out, flush=True)
    for w in wrong[:20]:
        print(f"# not valid: {w}", file=out)
    return total, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nq")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--schemas", type=int, default=20)
    parser.add_argument("--every", type=int, default=1, help="take every n-th schema")
    options = parser.parse_args()
    schemas = list(read(options.folder))[:: options.every]
    server = subprocess.Popen(
        [options.nq, "serve", "demo", "--device", "cpu", "--threads", "1", "--port", "0", "--parallel", "4", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )
    try:
        said = json.loads(server.stdout.readline())
        host, port = said["url"].removeprefix("http://").split(":")
        address = (host, int(port))
        results = parse_all(address, server.pid, schemas, sys.stdout)
        assert all(r[4] < 2 for r in results)
        if not options.answers:
            return
        chosen = choose(address, schemas, results, options.schemas)
        each = options.answers // len(chosen)
        (seconds, tokens), wrong = sample(address, server.pid, chosen, each, sys.stdout)
        begun, free = spent(server.pid), 0
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            length = max(1, tokens // (each * len(chosen)))
            asked = lambda seed: ask(address, body(None, seed, length) | {"ignore_eos": True})
            free = sum(a[1]["usage"]["completion_tokens"] for a in pool.map(asked, range(200)))
        bare = spent(server.pid) - begun
        print("answers,tokens,cpu_ms_a_token_of_4_at_once")
        print(f"with a schema,{tokens},{1e3 * seconds / tokens:.2f}")
        print(f"without,{free},{1e3 * bare / free:.2f}")
        assert server.poll() is None and not wrong
    finally:
        server.terminate()
        server.wait(60)


if __name__ == "__main__":
    main()
