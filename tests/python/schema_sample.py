"""Schemas as programs send them: which are accepted, which are refused and why, and whether answers validate.

    python tests/python/schema_sample.py URL [--answers N] [--tokens N] [--at-once N] [--only WORD]

The schemas are made up, in the manner of those that tools, configurations, records and events have. Needs `pip install jsonschema`,
which shares nothing with the server's engine. Exits 0 only if every answer that stopped validates, and the server failed never.
Formats are compared apart, because a validator does not check them by default.
"""

import argparse
import concurrent.futures
import json
import sys

import jsonschema

import random_schemas


def obj(properties, required=None, **more):
    """An object. Without a list, all of its properties are required. `more` may say what others it may have."""
    required = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False} | more


def text(most=30, **more):
    return {"type": "string", "maxLength": most} | more


def whole(low, high):
    return {"type": "integer", "minimum": low, "maximum": high}


def choice(*values):
    return {"enum": list(values)}


def many(items, most=4, **more):
    return {"type": "array", "items": items, "maxItems": most} | more


def ref(name):
    return {"$ref": f"#/$defs/{name}"}


def tagged(kind, properties):
    return obj({"type": {"const": kind}} | properties)


BOOL = {"type": "boolean"}
MONEY = {"type": "number", "minimum": 0, "maximum": 100000}
PLACE = obj({"street": text(), "city": text(), "postcode": {"type": "string", "pattern": "^[0-9]{4,5}$"}}, ["city"])
MAYBE = {"anyOf": [text(20), {"type": "null"}]}

TOOLS = {
    "weather": obj({"place": text(), "unit": choice("celsius", "fahrenheit"), "days": whole(1, 10)}, ["place"]),
    "read a file": obj({"path": {"type": "string", "minLength": 1, "maxLength": 80}, "offset": whole(0, 10**9), "limit": whole(1, 2000)}, ["path"]),
    "edit a file": obj({"path": text(80), "old": text(200), "new": text(200), "all": {"type": "boolean", "default": False}}, ["path", "old", "new"]),
    "run a command": obj({"command": text(100), "timeout_ms": {"type": ["integer", "null"], "minimum": 1}, "background": BOOL}, ["command"]),
    "search the web": obj({"query": text(60), "sites": many(text(30)), "since": {"type": "string", "format": "date"}}, ["query"]),
    "send a mail": obj({"to": many({"type": "string", "format": "email"}, 3, minItems=1), "subject": text(60), "body": text(200), "cc": many({"type": "string", "format": "email"}, 2)}, ["to", "subject", "body"]),
    "a calendar entry": obj({"title": text(), "start": {"type": "string", "format": "date-time"}, "minutes": {"type": "integer", "multipleOf": 15, "minimum": 15, "maximum": 480}, "guests": many(text(20))}, ["title", "start", "minutes"]),
    "a database query": obj({"table": choice("users", "orders", "items"), "where": many(obj({"column": text(20), "op": choice("=", "<", ">", "like"), "value": {"type": ["string", "number", "boolean", "null"], "maxLength": 20}}), 3), "limit": whole(1, 100)}, ["table"]),
    "no arguments": {"type": "object", "properties": {}, "additionalProperties": False},
    "arguments without a type": {"properties": {"city": text()}, "required": ["city"]},
    "a plan of steps": obj({"steps": many(obj({"text": text(60), "status": choice("pending", "in_progress", "completed")}), 5, minItems=1), "explanation": text(80)}, ["steps"]),
    "a named call": obj({"name": choice("add", "multiply"), "arguments": obj({"a": {"type": "number"}, "b": {"type": "number"}})}),
}

CONFIGURATIONS = {
    "a container": obj({"image": {"type": "string", "pattern": "^[a-z0-9./-]{1,40}(:[a-z0-9.]{1,10})?$"}, "ports": many(whole(1, 65535)), "env": {"type": "object", "additionalProperties": text(20), "maxProperties": 3}, "restart": choice("no", "always", "on-failure")}, ["image"]),
    "a workflow": obj({"name": text(), "on": choice("push", "schedule"), "jobs": many(obj({"id": text(12), "needs": many(text(12), 2), "steps": many(obj({"run": text(40)}), 3, minItems=1)}, ["id", "steps"]), 3, minItems=1)}),
    "logging": obj({"level": {"type": "string", "enum": ["debug", "info", "warn", "error"], "default": "info"}, "file": MAYBE, "rotate": obj({"megabytes": whole(1, 1000), "keep": whole(1, 30)})}, ["level"]),
    "a package": obj({"name": {"type": "string", "pattern": "^[a-z][a-z0-9-]{0,20}$"}, "version": {"type": "string", "pattern": "^\\d{1,3}\\.\\d{1,3}\\.\\d{1,3}$"}, "dependencies": {"type": "object", "patternProperties": {"^[a-z-]{1,12}$": {"type": "string", "pattern": "^[~^]?\\d{1,2}\\.\\d{1,2}$"}}, "additionalProperties": False}}),
    "a theme": obj({"colors": {"type": "object", "additionalProperties": {"type": "string", "pattern": "^#[0-9a-fA-F]{6}$"}, "minProperties": 1, "maxProperties": 4}, "dark": BOOL}),
    "a rule for a proxy": obj({"match": obj({"host": {"type": "string", "format": "hostname"}, "path": text()}, ["host"]), "to": {"type": "string", "format": "uri"}, "weight": {"type": "number", "exclusiveMinimum": 0, "maximum": 1}}),
    "a network": obj({"address": {"type": "string", "format": "ipv4"}, "gateway": {"type": "string", "format": "ipv6"}, "mask": whole(0, 32)}),
    "any further key": {"type": "object", "properties": {"port": whole(1, 65535)}, "required": ["port"]},
    "extensions by a prefix": {"type": "object", "properties": {"id": whole(1, 9)}, "patternProperties": {"^x-[a-z]{1,8}$": text(10)}, "required": ["id"], "additionalProperties": False},
    "two prefixes": {"type": "object", "patternProperties": {"^s_[a-z]{1,5}$": text(10), "^n_[a-z]{1,5}$": whole(0, 9)}, "additionalProperties": False, "maxProperties": 3},
    "names of one form": {"type": "object", "propertyNames": {"pattern": "^[A-Z_]{2,10}$"}, "additionalProperties": text(10)},
    "names of a list": {"type": "object", "propertyNames": {"enum": ["cpu", "memory", "disk"]}, "additionalProperties": whole(0, 100)},
}

RECORDS = {
    "a person": obj({"name": text(), "age": whole(0, 130), "address": PLACE, "tags": many(text(12))}, ["name", "age"]),
    "an order": obj({"id": {"type": "string", "format": "uuid"}, "lines": many(ref("line"), 3, minItems=1), "total": MONEY}) | {"$defs": {"line": obj({"sku": ref("sku"), "count": whole(1, 99), "price": MONEY}), "sku": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"}}},
    "refs in refs": {"$ref": "#/$defs/a", "$defs": {"a": obj({"b": ref("b")}), "b": obj({"c": many(ref("c"), 2)}), "c": {"anyOf": [ref("d"), {"type": "null"}]}, "d": obj({"n": whole(0, 9)})}},
    "definitions of draft 7": {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"point": obj({"x": {"type": "number"}, "y": {"type": "number"}})}, "type": "object", "properties": {"from": {"$ref": "#/definitions/point"}, "to": {"$ref": "#/definitions/point"}}, "required": ["from", "to"], "additionalProperties": False},
    "a ref beside keywords": obj({"home": ref("place") | {"description": "where they live"}}) | {"$defs": {"place": PLACE}},
    "a ref into a property": obj({"first": whole(1, 5), "second": {"$ref": "#/properties/first"}}),
    "an anchor": obj({"a": {"$ref": "#spot"}}) | {"$defs": {"s": {"$anchor": "spot"} | whole(0, 3)}},
    "another document": obj({"a": {"$ref": "https://example.com/other.json"}}),
    "as pydantic writes": {"title": "Invoice", "type": "object", "properties": {"number": {"title": "Number", "type": "string", "maxLength": 12}, "paid": {"title": "Paid", "type": "boolean", "default": False}, "note": {"title": "Note", "anyOf": [{"type": "string", "maxLength": 40}, {"type": "null"}], "default": None}, "amount": {"title": "Amount", "anyOf": [{"type": "number"}, {"type": "string", "pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"}]}}, "required": ["number", "amount"]},
    "as zod writes": {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": {"id": {"type": "string", "format": "cuid"}, "size": {"type": "integer", "exclusiveMinimum": 0}, "mode": {"type": "string", "enum": ["a", "b"]}}, "required": ["id", "size"], "additionalProperties": False},
    "all of two parts": {"allOf": [{"type": "object", "properties": {"id": whole(1, 99)}, "required": ["id"]}, {"type": "object", "properties": {"name": text(12)}, "required": ["name"]}]},
    "a part that closes": {"allOf": [ref("base")], "unevaluatedProperties": False, "$defs": {"base": {"type": "object", "properties": {"id": whole(1, 99)}, "required": ["id"]}}},
    "twenty fields": obj({f"field_{number:02}": [whole(0, 9), BOOL, choice("x", "y"), text(6)][number % 4] for number in range(20)}),
    "an optional tail": obj({"a": whole(0, 9), "b": whole(0, 9), "c": whole(0, 9), "d": whole(0, 9)}, ["c"]),
}

UNIONS = {
    "shapes by a tag": {"oneOf": [tagged("circle", {"radius": MONEY}), tagged("box", {"width": MONEY, "height": MONEY}), tagged("line", {"points": many(whole(-9, 9), 4, minItems=2)})]},
    "events by a tag": obj({"event": {"anyOf": [tagged("created", {"by": text(12)}), tagged("moved", {"to": text(12)}), tagged("deleted", {})]}, "at": {"type": "string", "format": "date-time"}}),
    "a discriminator": obj({"pet": {"oneOf": [ref("cat"), ref("dog")], "discriminator": {"propertyName": "type"}}}) | {"$defs": {"cat": tagged("cat", {"lives": whole(1, 9)}), "dog": tagged("dog", {"tricks": many(text(10), 2)})}},
    "a text or a number": obj({"value": {"type": ["string", "number"], "maxLength": 10}}),
    "one of that overlap": {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 10}]},
    "a list or one": obj({"to": {"anyOf": [text(12), many(text(12), 3)]}}),
    "null or an object": {"anyOf": [{"type": "null"}, PLACE]},
    "constants": {"enum": ["north", "south", 4, 4.5, True, None, ["a", 1], {"k": "v"}]},
    "a union of requirements": {"type": "object", "properties": {"id": whole(1, 9), "name": text(8)}, "anyOf": [{"required": ["id"]}, {"required": ["name"]}], "additionalProperties": False},
}

CONDITIONS = {
    "if, then and else": {"type": "object", "properties": {"kind": choice("card", "cash"), "number": {"type": "string", "pattern": "^[0-9]{8}$"}}, "required": ["kind"], "if": {"properties": {"kind": {"const": "card"}}}, "then": {"required": ["number"]}, "else": {"not": {"required": ["number"]}}},
    "a field that needs another": obj({"card": text(8), "address": text(12)}, []) | {"dependentRequired": {"card": ["address"]}},
    "a field that brings others": obj({"a": BOOL}, []) | {"dependentSchemas": {"a": {"required": ["b"]}}},
    "not a type": obj({"value": {"not": {"type": "null"}}}),
    "not a constant": obj({"name": text(8) | {"not": {"const": "root"}}}),
    "never": {"not": {}},
    "a property that is never there": obj({"a": whole(0, 9), "b": False}, ["a"]),
}

LISTS = {
    "a point": {"type": "array", "prefixItems": [{"type": "number"}, {"type": "number"}], "items": False, "minItems": 2},
    "a head and a tail": {"type": "array", "prefixItems": [choice("add", "sub")], "items": whole(0, 99), "minItems": 2, "maxItems": 4},
    "a table": many(many(whole(0, 9), 3, minItems=3), 3, minItems=3),
    "no two are equal": many(whole(1, 6), 3, uniqueItems=True),
    "one of them is": {"type": "array", "items": whole(0, 9), "contains": {"const": 7}, "maxItems": 5},
    "exactly four": many(BOOL, 4, minItems=4),
    "an empty list": {"type": "array", "maxItems": 0},
    "anything": {"type": "array", "maxItems": 3},
}

RECURSIVE = {
    "a tree": {"$ref": "#/$defs/node", "$defs": {"node": obj({"value": whole(0, 99), "children": many(ref("node"), 2)}, ["value"])}},
    "a linked list": obj({"value": whole(0, 9), "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
    "an expression": {"$ref": "#/$defs/e", "$defs": {"e": {"anyOf": [{"type": "number"}, obj({"op": choice("+", "*"), "left": ref("e"), "right": ref("e")})]}}},
    "a page of elements": obj({"page": ref("element")}) | {"$defs": {"element": obj({"tag": choice("div", "p", "button"), "text": text(20), "children": many(ref("element"), 3)}, ["tag"])}},
    "two that call each other": {"$ref": "#/$defs/even", "$defs": {"even": obj({"odd": {"anyOf": [ref("odd"), {"type": "null"}]}}), "odd": obj({"even": ref("even")})}},
    "any JSON": {"$ref": "#/$defs/json", "$defs": {"json": {"anyOf": [{"type": "null"}, BOOL, {"type": "number"}, text(10), many(ref("json"), 2), {"type": "object", "additionalProperties": ref("json"), "maxProperties": 2}]}}},
}

TEXTS = {
    "a phone number": {"type": "string", "pattern": "^\\+[1-9][0-9]{6,12}$"},
    "a word with an accent": {"type": "string", "pattern": "^[A-Za-zÀ-ÿ]{2,12}$"},
    "a pattern without anchors": {"type": "string", "pattern": "[0-9]{2}", "maxLength": 12},
    "a password, by lookahead": {"type": "string", "pattern": "^(?=.*[0-9])[a-z0-9]{8,16}$"},
    "a back reference": {"type": "string", "pattern": "^([a-z])\\1$"},
    "a duration": {"type": "string", "format": "duration"},
    "a time": {"type": "string", "format": "time"},
    "a pointer": {"type": "string", "format": "json-pointer"},
    "a format of nobody": {"type": "string", "format": "colour", "maxLength": 10},
    "an exact length": {"type": "string", "minLength": 5, "maxLength": 5},
    "a picture": obj({"data": {"type": "string", "contentEncoding": "base64", "contentMediaType": "image/png", "maxLength": 40}}),
}

NUMBERS = {
    "a percentage": {"type": "number", "minimum": 0, "maximum": 100},
    "an open interval": {"type": "number", "exclusiveMinimum": -1.5, "exclusiveMaximum": 1.5},
    "steps of a half": {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 10},
    "multiples of seven": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "bounds that exclude all": {"type": "integer", "minimum": 5, "maximum": 4},
    "a large integer": {"type": "integer", "minimum": 10**15, "maximum": 10**16},
}

ODD = {
    "no keyword": {},
    "a type that is not there": {"type": "strange"},
    "a property that must be there and is not described": {"type": "object", "required": ["a"], "properties": {}},
    "an enum of two hundred": {"enum": [f"code-{number:03}" for number in range(200)]},
    "notes alone": {"title": "A thing", "description": "of any kind", "examples": [1], "type": "object", "maxProperties": 1},
}

SAMPLE = {
    "tools": TOOLS,
    "configurations": CONFIGURATIONS,
    "records": RECORDS,
    "unions": UNIONS,
    "conditions": CONDITIONS,
    "lists": LISTS,
    "recursive": RECURSIVE,
    "texts": TEXTS,
    "numbers": NUMBERS,
    "odd": ODD,
}


def has_its_formats(schema, content):
    """Whether a valid answer is valid where a validator checks formats, too."""
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    return jsonschema.Draft202012Validator(schema, format_checker=checker).is_valid(json.loads(content))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--answers", type=int, default=2, help="to each schema")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--only", default="", help="schemas with this word in their name")
    run = parser.parse_args()
    sample = [
        (kind, name, schema)
        for kind, schemas in SAMPLE.items()
        for name, schema in schemas.items()
        if run.only in f"{kind} {name}"
    ]
    with concurrent.futures.ThreadPoolExecutor(run.at_once) as pool:
        asked = [
            [pool.submit(random_schemas.ask, run.url, schema, 3 * number + answer, run.tokens) for answer in range(run.answers)]
            for number, (_, _, schema) in enumerate(sample)
        ]
        outcomes = [[answer.result() for answer in answers] for answers in asked]
    columns = ("accepted", "refused", "valid", "cut", "invalid", "failed")
    counts = {kind: dict.fromkeys(columns, 0) for kind in SAMPLE}
    told, formats = [], []
    for (kind, name, schema), answers in zip(sample, outcomes):
        refused = any(outcome == "refused" for outcome, _ in answers)
        counts[kind]["refused" if refused else "accepted"] += 1
        if refused:
            told.append(f"  {kind}, {name}: refused: {answers[0][1][:300]}")
            continue
        for outcome, why in answers:
            counts[kind][outcome] += 1
            if outcome in ("invalid", "failed"):
                told.append(f"  {kind}, {name}: {outcome}: {why[:600]}")
            if outcome == "valid" and not has_its_formats(schema, why):
                formats.append(f"  {kind}, {name}: {why[:200]}")
    total = {column: sum(count[column] for count in counts.values()) for column in columns}
    print(f"{len(sample)} schemas, {run.answers} answers to each, of at most {run.tokens} tokens\n")
    print("| Schemas | accepted | refused | answers valid | cut by length | invalid | failed |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for kind, count in (counts | {"all": total}).items():
        if count["accepted"] + count["refused"]:
            print(f"| {kind} | " + " | ".join(str(count[column]) for column in columns) + " |")
    print("\n" + "\n".join(told))
    if formats:
        print(f"\nvalid, with a text that is not of its format: {len(formats)}\n" + "\n".join(formats))
    sys.exit(0 if total["valid"] and not total["failed"] and not total["invalid"] else 1)


if __name__ == "__main__":
    main()
