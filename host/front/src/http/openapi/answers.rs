//! Schemas of the bodies of answers.

use serde_json::{Map, Value, json};

use super::schema::reference;

/// The schemas of all bodies and of their parts, with their names.
pub(super) fn all() -> Vec<(&'static str, Value)> {
    vec![
        ("Error", error()),
        ("Usage", usage()),
        ("CachedTokensDetails", object(json!({"device": count(), "host": count()}), json!({}))),
        ("ChatLogprobs", chat_logprobs()),
        ("ChatCompletion", chat(false)),
        ("ChatCompletionChunk", chat(true)),
        ("Completion", completion(false)),
        ("CompletionChunk", completion(true)),
        ("Response", response()),
        ("ResponseEvent", response_event()),
        ("Generated", generated()),
        ("Tokens", tokens()),
        ("Text", object(json!({"prompt": text(), "text": text()}), json!({}))),
        ("Model", model()),
        ("Models", object(json!({"object": {"const": "list"}, "data": list(reference("Model"))}), json!({}))),
        ("ServerInfo", server_info()),
        ("ModelInfo", model_info()),
        ("Version", object(json!({"version": text()}), json!({}))),
        ("State", object(json!({"status": {"enum": ["ok", "unavailable", "draining"]}}), json!({}))),
        ("Health", health()),
        ("Flushed", flushed()),
        ("Draining", object(json!({"draining": text(), "role": text(), "instance": text()}), json!({}))),
    ]
}

/// Schema of an object with these fields and no others. The fields of `sometimes` may be absent.
fn object(always: Value, sometimes: Value) -> Value {
    let (Value::Object(always), Value::Object(sometimes)) = (always, sometimes) else { return json!({}) };
    let required: Vec<String> = always.keys().cloned().collect();
    let properties: Map<String, Value> = always.into_iter().chain(sometimes).collect();
    json!({"type": "object", "required": required, "properties": properties, "additionalProperties": false})
}

fn text() -> Value {
    json!({"type": "string"})
}

fn count() -> Value {
    json!({"type": "integer", "minimum": 0})
}

fn number() -> Value {
    json!({"type": "number"})
}

fn list(items: Value) -> Value {
    json!({"type": "array", "items": items})
}

/// The schema that also accepts `null`.
fn maybe(schema: Value) -> Value {
    json!({"anyOf": [schema, {"type": "null"}]})
}

fn error() -> Value {
    let error = object(
        json!({"message": text(), "type": text(), "param": maybe(text()), "code": maybe(text())}),
        json!({}),
    );
    object(json!({"error": error}), json!({}))
}

fn usage() -> Value {
    let details = object(json!({"cached_tokens": count()}), json!({}));
    object(
        json!({
            "prompt_tokens": count(),
            "completion_tokens": count(),
            "total_tokens": count(),
            "prompt_tokens_details": details,
        }),
        json!({}),
    )
}

fn sglext() -> Value {
    object(json!({"cached_tokens_details": reference("CachedTokensDetails")}), json!({}))
}

fn chat_logprobs() -> Value {
    let bytes = list(json!({"type": "integer", "minimum": 0, "maximum": 255}));
    let one = json!({"token": text(), "logprob": maybe(number()), "bytes": bytes});
    let mut with_others = one.clone();
    with_others["top_logprobs"] = list(object(one, json!({})));
    object(json!({"content": list(object(with_others, json!({})))}), json!({}))
}

/// Schema of the stop string or token that ended the answer.
fn stop_reason() -> Value {
    json!({"type": ["string", "integer", "null"]})
}

fn called() -> Value {
    let function = object(json!({"name": text(), "arguments": text()}), json!({}));
    object(json!({"id": text(), "type": {"const": "function"}, "function": function}), json!({}))
}

/// The fields that answers and their events share. Events may be without usage.
fn choices(kind: &str, choice: Value, is_event: bool) -> Value {
    let mut always = json!({
        "id": text(),
        "object": {"const": kind},
        "created": count(),
        "model": text(),
        "choices": list(choice),
    });
    let mut sometimes = json!({"sglext": sglext()});
    if is_event {
        sometimes["usage"] = maybe(reference("Usage"));
    } else {
        always["usage"] = reference("Usage");
    }
    object(always, sometimes)
}

fn chat(is_event: bool) -> Value {
    let reasons = json!({"enum": ["stop", "length", "tool_calls"]});
    let logprobs = maybe(reference("ChatLogprobs"));
    if is_event {
        let function = object(json!({"arguments": text()}), json!({"name": text()}));
        let call = object(
            json!({"index": count(), "function": function}),
            json!({"id": text(), "type": {"const": "function"}}),
        );
        let delta = object(
            json!({}),
            json!({
                "role": {"const": "assistant"},
                "content": text(),
                "reasoning_content": text(),
                "tool_calls": list(call),
            }),
        );
        let choice = object(
            json!({"index": count(), "delta": delta, "logprobs": logprobs, "finish_reason": maybe(reasons)}),
            json!({"stop_reason": stop_reason()}),
        );
        return choices("chat.completion.chunk", choice, true);
    }
    let message = object(
        json!({"role": {"const": "assistant"}, "content": maybe(text()), "refusal": {"type": "null"}}),
        json!({"reasoning_content": maybe(text()), "tool_calls": list(called())}),
    );
    let choice = object(
        json!({
            "index": count(),
            "message": message,
            "logprobs": logprobs,
            "finish_reason": reasons,
            "stop_reason": stop_reason(),
        }),
        json!({}),
    );
    choices("chat.completion", choice, false)
}

fn completion(is_event: bool) -> Value {
    let top = json!({"type": "object", "additionalProperties": number()});
    let logprobs = object(
        json!({
            "tokens": list(text()),
            "token_logprobs": list(maybe(number())),
            "top_logprobs": list(maybe(top)),
            "text_offset": list(count()),
        }),
        json!({}),
    );
    let reasons = json!({"enum": ["stop", "length"]});
    let choice = object(
        json!({
            "index": count(),
            "text": text(),
            "logprobs": maybe(logprobs),
            "finish_reason": if is_event { maybe(reasons) } else { reasons },
            "stop_reason": stop_reason(),
        }),
        json!({}),
    );
    choices("text_completion", choice, is_event)
}

fn response() -> Value {
    let items = json!({
        "type": "object",
        "required": ["id", "type", "status"],
        "properties": {
            "id": text(),
            "type": {"enum": ["reasoning", "message", "function_call"]},
            "status": {"enum": ["in_progress", "completed", "incomplete"]},
        },
    });
    let usage = object(
        json!({
            "input_tokens": count(),
            "input_tokens_details": object(json!({"cached_tokens": count()}), json!({})),
            "output_tokens": count(),
            "output_tokens_details": object(json!({"reasoning_tokens": count()}), json!({})),
            "total_tokens": count(),
        }),
        json!({}),
    );
    let failure = object(json!({"code": text(), "message": text()}), json!({}));
    let cut = object(json!({"reason": {"const": "max_output_tokens"}}), json!({}));
    let mut always = json!({
        "id": text(),
        "object": {"const": "response"},
        "created_at": count(),
        "status": {"enum": ["in_progress", "completed", "incomplete", "failed"]},
        "background": {"const": false},
        "error": maybe(failure),
        "incomplete_details": maybe(cut),
        "model": text(),
        "output": list(items),
        "previous_response_id": {"type": "null"},
        "store": {"const": false},
        "usage": maybe(usage),
    });
    for name in crate::http::responses::told_names() {
        always[name] = json!({"description": "As the request has it"});
    }
    object(always, json!({}))
}

fn response_event() -> Value {
    json!({
        "description": "An event, named by its type",
        "type": "object",
        "required": ["type", "sequence_number"],
        "properties": {"type": text(), "sequence_number": count(), "response": reference("Response")},
    })
}

fn generated() -> Value {
    let reason = object(
        json!({"type": {"enum": ["stop", "length"]}}),
        json!({"length": count(), "matched": {"type": ["string", "integer"]}}),
    );
    let meta = object(
        json!({
            "id": text(),
            "finish_reason": maybe(reason),
            "prompt_tokens": count(),
            "completion_tokens": count(),
            "cached_tokens": count(),
            "sampling_seed": {"type": "integer"},
        }),
        json!({
            "output_token_logprobs": {"type": "array"},
            "output_top_logprobs": {"type": "array"},
            "input_token_logprobs": {"type": "array"},
            "input_top_logprobs": {"type": "array"},
            "cached_tokens_details": reference("CachedTokensDetails"),
            "e2e_latency": number(),
            "ttft": number(),
            "transferred_bytes": maybe(count()),
            "transfer_plugin": maybe(text()),
            "prefill_worker": maybe(text()),
            "decode_worker": maybe(text()),
        }),
    );
    object(json!({"text": text(), "output_ids": list(count()), "meta_info": meta}), json!({"index": count()}))
}

fn tokens() -> Value {
    let one = object(
        json!({
            "count": count(),
            "max_model_len": maybe(count()),
            "token_strs": maybe(list(text())),
            "tokens": list(count()),
        }),
        json!({}),
    );
    let several = object(
        json!({
            "count": list(count()),
            "max_model_len": maybe(count()),
            "token_strs": maybe(list(list(text()))),
            "tokens": list(list(count())),
        }),
        json!({}),
    );
    json!({"anyOf": [one, several]})
}

fn model() -> Value {
    object(
        json!({
            "id": text(),
            "object": {"const": "model"},
            "created": count(),
            "owned_by": text(),
            "root": text(),
            "parent": {"type": "null"},
            "max_model_len": maybe(count()),
        }),
        json!({}),
    )
}

fn server_info() -> Value {
    object(
        json!({
            "model_path": text(),
            "tokenizer_path": text(),
            "served_model_name": text(),
            "version": text(),
            "context_length": maybe(count()),
            "max_total_num_tokens": maybe(count()),
            "max_req_input_len": maybe(count()),
            "tp_size": count(),
            "dp_size": count(),
            "pp_size": count(),
            "is_embedding": {"const": false},
            "disaggregation_mode": text(),
            "internal_states": list(json!({"type": "object"})),
        }),
        json!({}),
    )
}

fn model_info() -> Value {
    object(
        json!({
            "model_path": text(),
            "tokenizer_path": text(),
            "served_model_name": text(),
            "is_generation": {"const": true},
            "preferred_sampling_params": {"type": "null"},
            "weight_version": text(),
            "reasoning_parser": maybe(text()),
            "tool_call_parser": maybe(text()),
            "has_image_understanding": {"const": false},
            "has_audio_understanding": {"const": false},
        }),
        json!({}),
    )
}

fn health() -> Value {
    let worker = json!({
        "type": "object",
        "required": ["name", "role", "state", "instance", "address"],
        "properties": {
            "name": text(),
            "role": text(),
            "state": {"enum": ["live", "suspected", "draining", "warming"]},
            "instance": text(),
            "address": text(),
        },
    });
    let of_operators = json!({
        "model": text(),
        "why": maybe(text()),
        "max_tokens": maybe(count()),
        "requests_running": count(),
        "workers": list(worker),
        "refused_pairs": list(text()),
        "routing": {"type": "object"},
    });
    object(json!({"status": {"enum": ["ok", "unavailable"]}}), of_operators)
}

fn flushed() -> Value {
    let worker = object(
        json!({"name": text(), "role": text()}),
        json!({"cache": {"type": "boolean"}, "pages_freed": count(), "pages_in_use": count(), "error": text()}),
    );
    object(json!({"flushed": {"type": "boolean"}, "workers": list(worker)}), json!({}))
}
