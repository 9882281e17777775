//! `/v1/responses`: the text that reaches the prompt, and the items and events of the answer.

use std::sync::Arc;

use host_front::text::ChatTemplate;
use serde_json::{Value, json};

use super::fake_worker::{FakeWorker, Script, Step, prefills, says, steps};
use super::fixture::{Front, config};

const RESPONSES: &str = "/v1/responses";
/// A short form of Qwen's template. It does not know the role `developer`.
const TEMPLATE: &str = "{% if tools is not none %}{% for tool in tools %}[{{ tool.function | tojson }}]{% endfor %}{% endif %}\
{% for message in messages %}<{{ message.role }}>{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}\
{{ message.content + '' }}{% for call in message.tool_calls %}<tool_call>\
{\"name\": \"{{ call.function.name }}\", \"arguments\": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}{% endfor %}\
<assistant>{% if enable_thinking is false %}</think>{% endif %}";
const TWO_CALLS: &str = "<think>\nfirst\n</think>\n\nSure.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"place\":  \"Oslo\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {}}\n</tool_call>";

async fn front(thinks: bool, script: Script) -> (Front, FakeWorker, FakeWorker) {
    let mut config = config();
    config.text.template =
        Some(Arc::new(ChatTemplate::new(TEMPLATE.into(), String::new(), String::new()).unwrap()));
    config.text.dialect.thinks = thinks;
    let mut front = Front::start(config).await;
    let prefill = front.worker("prefill-0", "prefill", prefills()).await;
    let decode = front.worker("decode-0", "decode", script).await;
    (front, prefill, decode)
}

fn asking(more: &Value) -> Value {
    let mut body = json!({"input": "hi", "max_output_tokens": 300});
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

fn weather() -> Value {
    json!([{"type": "function", "name": "weather", "description": "of a place", "strict": true, "parameters": {
        "type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}])
}

/// The prompt and the grammar of the last call of a worker.
fn given(worker: &FakeWorker) -> (String, Option<String>) {
    let call = worker.watch.calls().pop().unwrap();
    let bytes = call.prompt.iter().map(|token| u8::try_from(*token).unwrap()).collect();
    (String::from_utf8(bytes).unwrap(), call.grammar.map(|grammar| grammar.text))
}

#[tokio::test]
async fn tools_that_another_server_runs_are_left_out() {
    let (front, _prefill, decode) = front(false, says("x")).await;
    let mut tools = weather();
    tools.as_array_mut().unwrap().push(json!({"type": "web_search", "external_web_access": false}));
    let more = json!({"tools": tools, "client_metadata": {"a": "b"}});
    assert_eq!(front.post(RESPONSES, &asking(&more)).await.status, 200);
    let prompt = given(&decode).0;
    assert!(prompt.contains("weather") && !prompt.contains("web_search"), "{prompt}");
    let more = json!({
        "tools": [{"type": "web_search"}, {"type": "web_search_2025_08_26"}],
        "tool_choice": "auto",
        "include": ["web_search_call.action.sources"],
        "input": [{"type": "web_search_call", "status": "completed"}, {"role": "user", "content": "hi"}],
    });
    assert_eq!(front.post(RESPONSES, &asking(&more)).await.status, 200);
    assert_eq!(given(&decode).0, "<user>hi<assistant>");
}

#[tokio::test]
async fn tools_of_a_namespace_are_called_by_their_namespace_and_name() {
    let call =
        "<tool_call>\n{\"name\": \"mcp__files__read\", \"arguments\": {\"path\": \"a\"}}\n</tool_call>";
    let (front, _prefill, decode) = front(false, says(call)).await;
    let of = |name: &str| json!({"type": "function", "name": name, "parameters": {"type": "object"}});
    let tools = json!([
        of("read"),
        {"type": "namespace", "name": "mcp__files", "description": "x", "tools": [of("read"), of("write")]},
        {"type": "namespace", "name": "mcp__web__", "tools": [of("read")]},
    ]);
    let whole =
        front.post(RESPONSES, &asking(&json!({"tools": tools, "max_output_tokens": 100}))).await.json().await;
    let item = &whole["output"][0];
    assert_eq!((&item["namespace"], &item["name"]), (&json!("mcp__files"), &json!("read")), "{whole}");
    assert_eq!(whole["tools"], tools);
    let prompt = given(&decode).0;
    for name in ["read", "mcp__files__read", "mcp__files__write", "mcp__web__read"] {
        assert!(prompt.contains(&format!("\"name\": \"{name}\"")), "{prompt}");
    }
    let events = front
        .post(RESPONSES, &asking(&json!({"tools": tools, "max_output_tokens": 100, "stream": true})))
        .await
        .events()
        .await;
    let (items, _) = built(&events);
    assert_eq!((&items[0]["namespace"], &items[0]["name"]), (&json!("mcp__files"), &json!("read")));
    // The next turn shows the model what it wrote.
    let input = json!([
        {"role": "user", "content": "hi"},
        item,
        {"type": "function_call_output", "call_id": item["call_id"], "output": "b"},
    ]);
    front.post(RESPONSES, &asking(&json!({"tools": tools, "max_output_tokens": 100, "input": input}))).await;
    let prompt = given(&decode).0;
    assert!(
        prompt.contains("<tool_call>{\"name\": \"mcp__files__read\", \"arguments\": {\"path\": \"a\"}}"),
        "{prompt}"
    );
    let chosen = json!({"type": "function", "namespace": "mcp__web__", "name": "read"});
    front
        .post(RESPONSES, &asking(&json!({"tools": tools, "max_output_tokens": 100, "tool_choice": chosen})))
        .await;
    assert!(given(&decode).1.unwrap().contains("mcp__web__read"));
}

/// Builds items from a stream as a client does: it adds each event to the item that the event names, like the `openai` package.
/// Returns the items and the last event.
fn built(events: &[Value]) -> (Vec<Value>, Value) {
    let numbers: Vec<u64> =
        events.iter().map(|event| event["sequence_number"].as_u64().expect("a number")).collect();
    assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());
    let mut items: Vec<Value> = Vec::new();
    let mut done: Vec<Value> = Vec::new();
    let (last, before) = events.split_last().unwrap();
    for (number, event) in before.iter().enumerate() {
        let index = event["output_index"].as_u64().map(|index| usize::try_from(index).unwrap());
        let kind = event["type"].as_str().unwrap();
        if let Some(id) = event.get("item_id") {
            assert_eq!(*id, items[index.unwrap()]["id"], "{event}");
        }
        match kind {
            "response.created" => assert_eq!(number, 0),
            "response.in_progress" => assert_eq!(number, 1),
            "response.output_item.added" => {
                assert_eq!(index.unwrap(), items.len());
                assert_eq!(done.len(), items.len(), "one after the other");
                items.push(event["item"].clone());
            }
            "response.content_part.added" => {
                assert_eq!(event["part"]["text"], "");
                items[index.unwrap()]["content"].as_array_mut().unwrap().push(event["part"].clone());
            }
            "response.output_text.delta" | "response.reasoning_text.delta" => {
                let part = &mut items[index.unwrap()]["content"][0];
                part["text"] =
                    json!(part["text"].as_str().unwrap().to_owned() + event["delta"].as_str().unwrap());
                for shown in event["logprobs"].as_array().into_iter().flatten() {
                    part["logprobs"].as_array_mut().unwrap().push(shown.clone());
                }
            }
            "response.output_text.done" | "response.reasoning_text.done" => {
                assert_eq!(items[index.unwrap()]["content"][0]["text"], event["text"]);
            }
            "response.content_part.done" => assert_eq!(items[index.unwrap()]["content"][0], event["part"]),
            "response.function_call_arguments.delta" => {
                let all = items[index.unwrap()]["arguments"].as_str().unwrap().to_owned()
                    + event["delta"].as_str().unwrap();
                items[index.unwrap()]["arguments"] = json!(all);
            }
            "response.function_call_arguments.done" => {
                assert_eq!(
                    (&items[index.unwrap()]["arguments"], &items[index.unwrap()]["name"]),
                    (&event["arguments"], &event["name"])
                );
            }
            "response.output_item.done" => {
                items[index.unwrap()]["status"] = event["item"]["status"].clone();
                assert_eq!(items[index.unwrap()], event["item"]);
                done.push(event["item"].clone());
            }
            other => panic!("{other}"),
        }
    }
    assert_eq!(done, items, "each has its end");
    (done, last.clone())
}

/// A response without the fields that differ between two requests.
fn bare(mut response: Value) -> Value {
    for name in ["id", "created_at"] {
        response[name] = Value::Null;
    }
    for item in response["output"].as_array_mut().unwrap() {
        item["id"] = Value::Null;
        if item.get("call_id").is_some() {
            item["call_id"] = Value::Null;
        }
    }
    response
}

#[tokio::test]
async fn a_response_has_its_output_and_says_what_was_requested() {
    let (front, _prefill, _decode) = front(false, says("Hello.")).await;
    let answer =
        front.post(RESPONSES, &asking(&json!({"instructions": "Be brief.", "temperature": 0.5}))).await;
    assert_eq!(answer.status, 200);
    let answer = answer.json().await;
    let id = answer["id"].as_str().unwrap().strip_prefix("resp_").unwrap().to_owned();
    assert_eq!((&answer["object"], &answer["status"]), (&json!("response"), &json!("completed")));
    let part = json!({"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": []});
    let item = json!({
        "type": "message", "id": format!("msg_{id}_0"), "role": "assistant", "status": "completed", "content": [part],
    });
    assert_eq!(answer["output"], json!([item]));
    assert_eq!(
        answer["usage"],
        json!({
            "input_tokens": 36, "input_tokens_details": {"cached_tokens": 3},
            "output_tokens": 6, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 42,
        })
    );
    for (name, value) in [
        ("instructions", json!("Be brief.")),
        ("max_output_tokens", json!(300)),
        ("temperature", json!(0.5)),
        ("top_p", json!(1.0)),
        ("store", json!(false)),
        ("error", Value::Null),
        ("incomplete_details", Value::Null),
        ("previous_response_id", Value::Null),
        ("tools", json!([])),
    ] {
        assert_eq!(answer[name], value, "{name}");
    }
}

#[tokio::test]
async fn a_stream_builds_the_response_that_a_whole_answer_is() {
    let tools = || json!({"tools": weather()});
    for (thinks, text, more, kinds) in [
        (false, "Hello.", json!({}), vec!["message"]),
        (false, " \n", json!({}), vec!["message"]),
        (false, "", json!({}), vec!["message"]),
        (true, "<think>\nfirst\n</think>\n\nSure.", json!({}), vec!["reasoning", "message"]),
        (true, TWO_CALLS, tools(), vec!["reasoning", "message", "function_call", "function_call"]),
        (
            false,
            "<tool_call>{\"name\": \"weather\", \"arguments\": {\"place\": \"x\"}}</tool_call> Done.",
            tools(),
            vec!["function_call", "message"],
        ),
        (true, "<think>\nto no end", json!({"max_output_tokens": 12}), vec!["reasoning"]),
        (
            false,
            "<tool_call>{\"name\": \"weather\", \"arguments\": {\"place\": \"xyz\"}}</tool_call>",
            json!({"tools": weather(), "max_output_tokens": 50}),
            vec!["function_call"],
        ),
    ] {
        let cut = more.get("max_output_tokens").and_then(Value::as_u64);
        let script = match cut {
            None => says(text),
            Some(most) => {
                let tokens =
                    text.bytes().take(usize::try_from(most).unwrap()).map(|byte| Step::Token(byte.into()));
                steps(tokens.chain([Step::Finish("length")]).collect())
            }
        };
        let (front, _prefill, _decode) = front(thinks, script).await;
        let whole = front.post(RESPONSES, &asking(&more)).await.json().await;
        assert_eq!(whole["object"], "response", "{text:?}: {whole}");
        let found: Vec<&str> =
            whole["output"].as_array().unwrap().iter().map(|item| item["type"].as_str().unwrap()).collect();
        assert_eq!(found, kinds, "{text:?}: {whole}");
        let status = if cut.is_some() { "incomplete" } else { "completed" };
        assert_eq!(whole["status"], status);
        assert_eq!(whole["output"].as_array().unwrap().last().unwrap()["status"], status);
        let reason = if cut.is_some() { json!({"reason": "max_output_tokens"}) } else { Value::Null };
        assert_eq!(whole["incomplete_details"], reason);

        let mut streamed = asking(&more);
        streamed["stream"] = json!(true);
        let events = front.post(RESPONSES, &streamed).await.events().await;
        assert!(events.iter().all(Value::is_object), "no [DONE]: {events:?}");
        let (items, last) = built(&events);
        assert_eq!(last["type"], format!("response.{status}"));
        assert_eq!(last["response"]["output"], Value::from(items));
        assert_eq!(bare(last["response"].clone()), bare(whole), "{text:?}");
    }
}

#[tokio::test]
async fn tokens_of_thoughts_are_counted_apart() {
    let (front, _prefill, _decode) = front(true, says("<think>\nab</think>cd")).await;
    let answer = front.post(RESPONSES, &asking(&json!({}))).await.json().await;
    assert_eq!(answer["usage"]["output_tokens"], 20);
    assert_eq!(answer["usage"]["output_tokens_details"]["reasoning_tokens"], 18);
    let answer = front.post(RESPONSES, &asking(&json!({"reasoning": {"effort": "none"}}))).await.json().await;
    assert_eq!(answer["output"][0]["content"][0]["text"], "<think>\nab</think>cd", "{answer}");
    assert_eq!(answer["usage"]["output_tokens_details"]["reasoning_tokens"], 0);
}

#[tokio::test]
async fn log_probabilities_come_with_the_text_of_their_tokens() {
    let (front, _prefill, _decode) = front(false, says("abc")).await;
    let more = json!({"include": ["message.output_text.logprobs"], "top_logprobs": 2, "stream": true});
    let events = front.post(RESPONSES, &asking(&more)).await.events().await;
    let (items, _) = built(&events);
    let shown = items[0]["content"][0]["logprobs"].as_array().unwrap();
    let tokens: Vec<&str> = shown.iter().map(|shown| shown["token"].as_str().unwrap()).collect();
    assert_eq!(tokens, ["a", "b", "c"]);
}

#[tokio::test]
async fn items_of_a_conversation_reach_the_template() {
    let (front, _prefill, decode) = front(true, says("fine")).await;
    let input = json!([
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Use tools."}]},
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
            "content": [{"type": "output_text", "text": "Wait.", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "weather", "arguments": "{\"z\": 1, \"a\": 2}"},
        {"type": "function_call", "call_id": "call_2", "name": "weather", "arguments": ""},
        {"type": "function_call_output", "call_id": "call_1", "output": "cold"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "warm"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "again"}]},
        {"type": "function_call", "call_id": "call_3", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_3", "output": "mild"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]},
        {"type": "function_call", "call_id": "call_4", "name": "weather", "arguments": "{}"},
        {"role": "assistant", "content": "Once more."},
        {"role": "developer", "content": "Now."},
    ]);
    let reply = front
        .post(
            RESPONSES,
            &asking(&json!({"input": input, "instructions": "Be brief.", "max_output_tokens": 8})),
        )
        .await;
    assert_eq!(reply.status, 200);
    let call = |arguments: &str| {
        format!("<tool_call>{{\"name\": \"weather\", \"arguments\": {arguments}}}</tool_call>")
    };
    let prompt = format!(
        "<system>Be brief.\n\nUse tools.<user>hi<assistant>(hm)Wait.{}{}<tool>cold<tool>warm<assistant>(again){}<tool>mild<assistant>(short)Once more.{}<system>Now.<assistant>",
        call("{\"z\": 1, \"a\": 2}"),
        call("{}"),
        call("{}"),
        call("{}")
    );
    assert_eq!(given(&decode).0, prompt);
}

#[tokio::test]
async fn a_schema_and_a_call_that_is_demanded_hold_the_answer() {
    let (front, _prefill, decode) = front(
        false,
        says("<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"place\": \"x\"}}\n</tool_call>"),
    )
    .await;
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let format = json!({"type": "json_schema", "name": "x", "strict": true, "schema": schema});
    let answer =
        front.post(RESPONSES, &asking(&json!({"text": {"format": format, "verbosity": "low"}}))).await;
    assert_eq!(answer.json().await["text"]["format"], format);
    assert_eq!(given(&decode).1, Some(schema.to_string()));

    for choice in [json!("required"), json!({"type": "function", "name": "weather"})] {
        let more = json!({"tools": weather(), "tool_choice": choice});
        let answer = front.post(RESPONSES, &asking(&more)).await.json().await;
        let item = &answer["output"][0];
        assert_eq!((&item["type"], &item["name"]), (&json!("function_call"), &json!("weather")), "{answer}");
        assert_ne!(item["id"], item["call_id"]);
        assert_eq!((&answer["tool_choice"], &answer["tools"]), (&choice, &weather()));
        let (prompt, grammar) = given(&decode);
        assert!(prompt.starts_with("[{\"name\": \"weather\", \"description\": \"of a place\""), "{prompt}");
        assert!(grammar.unwrap().contains("\"place\""));
    }
}

#[tokio::test]
async fn what_agents_send_beside_is_taken() {
    let (front, _prefill, decode) = front(false, says("x")).await;
    let reply = front
        .post(
            RESPONSES,
            &json!({
                "model": "fake", "instructions": "", "input": [{"type": "message", "role": "user", "content": "hi"}],
                "tools": [], "tool_choice": "auto", "parallel_tool_calls": false, "reasoning": null, "store": false,
                "stream": true, "stream_options": {"include_obfuscation": false}, "include": ["reasoning.encrypted_content"],
                "prompt_cache_key": "session", "service_tier": "auto", "metadata": {"a": "b"}, "truncation": "disabled",
                "max_tool_calls": 4, "background": false, "previous_response_id": null, "user": "me", "safety_identifier": "me",
            }),
        )
        .await;
    assert_eq!(reply.status, 200);
    let events = reply.events().await;
    assert_eq!(events.last().unwrap()["response"]["metadata"], json!({"a": "b"}));
    assert_eq!(given(&decode).0, "<user>hi<assistant>");
}

#[tokio::test]
async fn what_it_has_not_is_refused_in_a_sentence() {
    let (front, _prefill, _decode) = front(false, says("x")).await;
    for (more, param, words) in [
        (json!({"input": null}), "input", "input is missing"),
        (json!({"input": []}), "input", "at least one item"),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), "input[0]", "send the item itself"),
        (json!({"input": [{"type": "mcp_call"}]}), "input[0].type", "does not have"),
        (json!({"tools": [{"type": "namespace", "name": "a b", "tools": []}]}), "tools[0]", "namespace"),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
            "input[0].content",
            "no images",
        ),
        (json!({"input": [{"role": "tool", "content": "x"}]}), "input[0].role", "one of system"),
        (
            json!({"input": [{"type": "function_call", "call_id": "a", "name": "b", "arguments": 1}]}),
            "input[0].arguments",
            "a JSON object",
        ),
        (json!({"input": [{"type": "function_call_output", "output": "b"}]}), "input[0].call_id", "a text"),
        (json!({"previous_response_id": "resp_1"}), "previous_response_id", "send the whole conversation"),
        (json!({"conversation": "conv_1"}), "conversation", "send the whole conversation"),
        (json!({"background": true}), "background", "keeps no responses"),
        (json!({"prompt": {"id": "p"}}), "prompt", "keeps no prompts"),
        (json!({"truncation": "auto"}), "truncation", "not supported"),
        (json!({"tools": [{"type": "file_search"}]}), "tools[0]", "no tools of its own"),
        (
            json!({"tools": [{"type": "web_search"}], "tool_choice": "required"}),
            "tool_choice",
            "none of the tools",
        ),
        (json!({"tools": [{"type": "function", "name": "a b"}]}), "tools[0].name", "letters"),
        (
            json!({"tools": [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "a b"}]}]}),
            "tools[1].tools[0].name",
            "letters",
        ),
        (
            json!({"tools": [{"type": "namespace", "name": "n", "tools": vec![weather()[0].clone(); 200]}]}),
            "tools",
            "up to 128 tools",
        ),
        (
            json!({"tools": weather(), "tool_choice": {"type": "function", "name": "f"}}),
            "tool_choice",
            "not among the tools",
        ),
        (
            json!({"tools": weather(), "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}),
            "tool_choice",
            "must be",
        ),
        (json!({"text": {"format": {"type": "json_schema"}}}), "text.format", "\"name\": …, \"schema\""),
        (json!({"text": {"format": {}}}), "text.format", "must be {\"type\": \"text\"}"),
        (json!({"text": {"format": {"type": "json_object"}}, "regex": "a"}), "text.format", "give one"),
        (json!({"include": ["file_search_call.results"]}), "include", "a list of"),
        (json!({"max_output_tokens": 0}), "max_output_tokens", "from 1"),
        (json!({"metadata": {"a": "b".repeat(20_000)}}), "metadata", "longer than 16384 bytes"),
        (json!({"messages": [{"role": "user", "content": "x"}]}), "messages", "not known here"),
    ] {
        let reply = front.post(RESPONSES, &asking(&more)).await;
        assert_eq!(reply.status, 400, "{more}");
        let error = reply.json().await;
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.contains(words), "{more}: {message}");
        assert_eq!(error["error"]["param"], param, "{more}: {message}");
    }
}

#[tokio::test]
async fn a_stream_that_breaks_off_ends_with_what_failed() {
    let (front, _prefill, _decode) = front(
        false,
        steps(vec![Step::Token(97), Step::Token(98), Step::Fail { code: "executor", retryable: false }]),
    )
    .await;
    let events = front.post(RESPONSES, &asking(&json!({"stream": true}))).await.events().await;
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.failed", "{events:?}");
    assert_eq!(last["response"]["status"], "failed");
    assert!(
        last["response"]["error"]["message"].is_string() && last["response"]["error"]["code"].is_string()
    );
    assert!(events.iter().all(|event| event["type"] != "response.completed"));
}
