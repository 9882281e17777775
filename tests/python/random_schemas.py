"""Random schemas against a server: every answer that ends with stop must validate.

    python tests/python/random_schemas.py URL [--count N] [--seed N] [--tokens N] [--at-once N]

Needs `pip install jsonschema`, which shares nothing with the server's engine. Exits 0 only when all that stopped validate.
"""

import argparse
import concurrent.futures
import json
import random
import sys
import urllib.error
import urllib.request

import jsonschema

WORDS = "name age city score tags kind size color items notes price count".split()


def schema(draw, depth, definitions):
    kinds = ["string", "integer", "number", "boolean", "enum", "const", "pattern", "format", "union"]
    if depth > 0:
        kinds += ["object", "array", "object", "array", "anyOf", "ref"]
    kind = draw.choice(kinds)
    if kind == "string":
        low = draw.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + draw.randint(0, 12)}
    if kind in ("integer", "number"):
        low = draw.randint(-50, 50)
        bounds = {"minimum": low, "maximum": low + draw.randint(1, 500)}
        if kind == "integer" and draw.random() < 0.3:
            bounds = {"exclusiveMinimum": low, "multipleOf": draw.choice([2, 5, 10]), "maximum": low + 100}
        return {"type": kind} | bounds
    if kind == "boolean":
        return {"type": "boolean"}
    if kind == "enum":
        return {"enum": draw.sample(["red", "grün", 'a"b', "x\n", 1, -2.5, True, None, "longer text"], draw.randint(1, 5))}
    if kind == "const":
        return {"const": draw.choice(["fixed", 7, None, False, "日本"])}
    if kind == "pattern":
        return {"type": "string", "pattern": draw.choice(["^[a-z]{2,5}$", "^\\d{3}-\\d{2}$", "^(a|bc)+x{1,3}$", "^[A-Z][a-z]*$"]), "maxLength": 12}
    if kind == "format":
        return {"type": "string", "format": draw.choice(["date", "time", "date-time", "uuid", "ipv4", "email"])}
    if kind == "union":
        return {"type": draw.sample(["string", "integer", "null", "boolean"], 2), "maxLength": 8, "minimum": 0, "maximum": 99}
    if kind == "array":
        low = draw.randint(0, 2)
        return {"type": "array", "items": schema(draw, depth - 1, definitions), "minItems": low, "maxItems": low + draw.randint(0, 3)}
    if kind == "anyOf":
        return {"anyOf": [schema(draw, depth - 1, definitions) for _ in range(draw.randint(2, 3))]}
    if kind == "ref":
        name = f"d{len(definitions)}"
        definitions[name] = {"type": "boolean"}
        definitions[name] = schema(draw, depth - 1, definitions)
        return {"$ref": f"#/$defs/{name}"}
    names = draw.sample(WORDS, draw.randint(1, 5))
    required = draw.sample(names, draw.randint(0, len(names)))
    made = {"type": "object", "properties": {name: schema(draw, depth - 1, definitions) for name in names}, "required": required}
    if draw.random() < 0.8:
        made["additionalProperties"] = False
    elif draw.random() < 0.5:
        made["additionalProperties"] = {"type": "integer"}
    return made


def whole(draw):
    definitions = {}
    names = draw.sample(WORDS, draw.randint(1, 5))
    made = {
        "type": "object",
        "properties": {name: schema(draw, 3, definitions) for name in names},
        "required": draw.sample(names, draw.randint(0, len(names))),
        "additionalProperties": False,
    }
    if definitions:
        made["$defs"] = definitions
    return made


def ask(url, wanted, seed, tokens):
    """Asks for JSON of a schema. Returns the outcome, and what there is to say of it: of a valid answer, its text."""
    body = {
        "messages": [{"role": "user", "content": "Make up an example as JSON."}],
        "max_tokens": tokens,
        "temperature": 0.0 if seed % 3 == 0 else 1.0,
        "seed": seed,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": wanted}},
    }
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            choice = json.load(answer)["choices"][0]
    except urllib.error.HTTPError as error:
        message = json.loads(error.read())["error"]["message"]
        return ("refused" if error.code == 400 else "failed", message)
    if choice["finish_reason"] != "stop":
        return ("cut", choice["finish_reason"])
    try:
        jsonschema.Draft202012Validator(wanted).validate(json.loads(choice["message"]["content"]))
    except (ValueError, jsonschema.ValidationError) as error:
        return ("invalid", f"{error}: {choice['message']['content']}: {json.dumps(wanted)}")
    return ("valid", choice["message"]["content"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=8)
    run = parser.parse_args()
    draw = random.Random(run.seed)
    schemas = [whole(draw) for _ in range(run.count)]
    with concurrent.futures.ThreadPoolExecutor(run.at_once) as pool:
        outcomes = list(pool.map(lambda n: ask(run.url, schemas[n], n, run.tokens), range(run.count)))
    counts = {kind: sum(1 for outcome in outcomes if outcome[0] == kind) for kind in ("valid", "cut", "refused", "failed", "invalid")}
    print(f"{run.count} schemas of seed {run.seed}: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    for number, (kind, why) in enumerate(outcomes):
        if kind in ("refused", "failed", "invalid"):
            print(f"  {number} {kind}: {why[:600]}")
    sys.exit(0 if counts["valid"] and not counts["failed"] and not counts["invalid"] else 1)


if __name__ == "__main__":
    main()
