//! Tools in chat requests: how they reach the prompt, and how calls in an answer reach the client.

use std::sync::Arc;

use host_front::text::{CallFormat, ChatTemplate, Dialect};
use host_tests::wait::answered_until;
use serde_json::{Value, json};

use super::fake_worker::{FakeWorker, Script, Step, prefills, says, steps};
use super::fixture::{Front, config};

const CHAT: &str = "/v1/chat/completions";
/// A short form of Qwen's template.
const TEMPLATE: &str = "{% if tools is not none %}{% for tool in tools %}[{{ tool.function | tojson }}]{% endfor %}{% endif %}\
{% for message in messages %}<{{ message.role }}>{{ message.content + '' }}{% for call in message.tool_calls %}<tool_call>\
{\"name\": \"{{ call.function.name }}\", \"arguments\": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}{% endfor %}<assistant>";

async fn front(template: &str, thinks: bool, answer: &str) -> (Front, FakeWorker, FakeWorker) {
    front_of(template, Dialect { thinks, calls: None }, answer).await
}

async fn front_of(template: &str, dialect: Dialect, answer: &str) -> (Front, FakeWorker, FakeWorker) {
    let mut config = config();
    config.text.template =
        Some(Arc::new(ChatTemplate::new(template.into(), String::new(), String::new()).unwrap()));
    config.text.dialect = dialect;
    let mut front = Front::start(config).await;
    let prefill = front.worker("prefill-0", "prefill", prefills()).await;
    let decode = front.worker("decode-0", "decode", says(answer)).await;
    (front, prefill, decode)
}

fn weather() -> Value {
    json!([{"type": "function", "function": {"name": "weather", "description": "of a place", "parameters": {
        "type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}}])
}

fn asking(more: &Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "tools": weather()});
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

/// The prompt and the grammar of the last call of a worker.
fn given(worker: &FakeWorker) -> (String, Option<String>) {
    let call = worker.watch.calls().pop().unwrap();
    let bytes = call.prompt.iter().map(|token| u8::try_from(*token).unwrap()).collect();
    (String::from_utf8(bytes).unwrap(), call.grammar.map(|grammar| grammar.text))
}

/// Joins the events of a stream as clients do: it joins parts with the same index, like the `openai` package.
fn joined(events: &[Value]) -> (String, String, Vec<Value>, Value) {
    let (mut text, mut thoughts, mut calls, mut reason) =
        (String::new(), String::new(), Vec::<Value>::new(), Value::Null);
    for choice in events.iter().map(|event| &event["choices"][0]) {
        let delta = &choice["delta"];
        text += delta["content"].as_str().unwrap_or_default();
        thoughts += delta["reasoning_content"].as_str().unwrap_or_default();
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = usize::try_from(call["index"].as_u64().unwrap()).unwrap();
            if index == calls.len() {
                assert_eq!(
                    (&call["type"], &call["function"]["arguments"]),
                    (&json!("function"), &json!("")),
                    "{call}"
                );
                calls.push(call.clone());
                continue;
            }
            assert!(
                call.get("id").is_none() && call["function"].get("name").is_none(),
                "clients would join it: {call}"
            );
            let all = calls[index]["function"]["arguments"].as_str().unwrap().to_owned();
            calls[index]["function"]["arguments"] =
                json!(all + call["function"]["arguments"].as_str().unwrap());
        }
        if !choice["finish_reason"].is_null() {
            assert!(reason.is_null(), "one end");
            reason = choice["finish_reason"].clone();
        }
    }
    (text, thoughts, calls, reason)
}

const TWO_CALLS: &str = "<think>\nfirst\n</think>\n\nSure.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"place\":  \"Oslo\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {}}\n</tool_call>";

#[tokio::test]
async fn calls_and_thoughts_come_apart_from_the_text_whole_and_streamed() {
    let (front, _prefill, decode) = front(TEMPLATE, true, TWO_CALLS).await;
    let answer = front.post(CHAT, &asking(&json!({}))).await.json().await;
    let choice = &answer["choices"][0];
    let message = &choice["message"];
    assert_eq!(
        (&message["content"], &message["reasoning_content"]),
        (&json!("Sure."), &json!("\nfirst")),
        "{answer}"
    );
    assert_eq!(choice["finish_reason"], "tool_calls");
    let calls = message["tool_calls"].as_array().unwrap();
    let arguments: Vec<&Value> = calls.iter().map(|call| &call["function"]["arguments"]).collect();
    assert_eq!(arguments, [&json!("{\"place\":  \"Oslo\"}"), &json!("{}")], "as the model wrote them");
    assert_ne!(calls[0]["id"], calls[1]["id"]);
    assert!(
        calls.iter().all(|call| call["id"].as_str().unwrap().len() == 29 && call.get("index").is_none()),
        "{calls:?}"
    );
    let (prompt, grammar) = given(&decode);
    assert!(prompt.starts_with("[{\"name\": \"weather\", \"description\": \"of a place\""), "{prompt}");
    assert_eq!(grammar, None, "the model decides");

    let events = front.post(CHAT, &asking(&json!({"stream": true}))).await.events().await;
    let (text, thoughts, streamed, reason) = joined(&events);
    assert_eq!((text.as_str(), thoughts.as_str(), reason), ("Sure.", "\nfirst", json!("tool_calls")));
    let streamed: Vec<&Value> = streamed.iter().map(|call| &call["function"]["arguments"]).collect();
    assert_eq!(streamed, arguments);

    let hidden = json!({"include_reasoning": false});
    let answer = front.post(CHAT, &asking(&hidden)).await.json().await;
    let message = answer["choices"][0]["message"].as_object().unwrap();
    assert_eq!((&message["content"], message.get("reasoning_content")), (&json!("Sure."), None));
    let hidden = json!({"include_reasoning": false, "stream": true});
    let events = front.post(CHAT, &asking(&hidden)).await.events().await;
    let (text, thoughts, ..) = joined(&events);
    assert_eq!((text.as_str(), thoughts.as_str()), ("Sure.", ""));

    for (both, field) in [
        (json!({"include_reasoning": false, "logprobs": true}), "include_reasoning"),
        (json!({"include_reasoning": false, "separate_reasoning": false}), "separate_reasoning"),
        (json!({"stream_reasoning": false, "logprobs": true}), "stream_reasoning"),
    ] {
        let reply = front.post(CHAT, &asking(&both)).await;
        assert_eq!((reply.status, &reply.json().await["error"]["param"]), (400, &json!(field)));
    }

    let one = asking(&json!({"parallel_tool_calls": false}));
    let answer = front.post(CHAT, &one).await.json().await;
    assert_eq!(answer["choices"][0]["message"]["tool_calls"].as_array().map(Vec::len), Some(1));
}

/// A call that the model only considers is none, also where thoughts are part of the text.
#[tokio::test]
async fn thoughts_stay_in_the_text_or_come_at_once_as_the_client_wants() {
    let thoughts =
        "<think>\nA <tool_call>\n{\"name\": \"weather\", \"arguments\": {}}\n</tool_call>?\n</think>\n\n";
    let call = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"place\":  \"Oslo\"}}\n</tool_call>";
    let (front, _prefill, _decode) = front(TEMPLATE, true, &format!("{thoughts}Sure.\n{call}")).await;
    let in_text = |more: Value| {
        let mut more = more;
        more["separate_reasoning"] = json!(false);
        asking(&more)
    };
    let answer = front.post(CHAT, &in_text(json!({}))).await.json().await;
    let message = &answer["choices"][0]["message"];
    assert_eq!(message["content"], format!("{thoughts}Sure."));
    assert_eq!(
        (message.get("reasoning_content"), message["tool_calls"].as_array().unwrap().len()),
        (None, 1)
    );
    let events = front.post(CHAT, &in_text(json!({"stream": true}))).await.events().await;
    let (text, apart, calls, reason) = joined(&events);
    assert_eq!((text, apart.as_str(), calls.len()), (format!("{thoughts}Sure."), "", 1));
    assert_eq!(reason, "tool_calls");

    let at_once = asking(&json!({"stream_reasoning": false, "stream": true, "n": 2}));
    let events = front.post(CHAT, &at_once).await.events().await;
    for number in 0..2 {
        let choices = events.iter().filter_map(|event| event["choices"].get(0));
        let of_one = choices.filter(|choice| choice["index"] == number).map(|choice| &choice["delta"]);
        let all: Vec<&Value> = of_one.filter(|delta| delta.get("role").is_none()).collect();
        let known = thoughts.trim_start_matches("<think>").trim_end().trim_end_matches("</think>").trim_end();
        assert_eq!(all[0], &json!({"reasoning_content": known}));
        assert!(all[1..].iter().all(|delta| delta.get("reasoning_content").is_none()), "{all:?}");
    }
}

/// A front whose model thinks, with one worker for long answers.
async fn front_that_thinks(script: Script) -> (Front, FakeWorker) {
    let mut config = config();
    config.text.template =
        Some(Arc::new(ChatTemplate::new(TEMPLATE.into(), String::new(), String::new()).unwrap()));
    config.text.dialect = Dialect { thinks: true, calls: None };
    let mut front = Front::start(config).await;
    let mut worker = FakeWorker::start("all", "aggregated", 7, script);
    worker.info.max_tokens = 1 << 20;
    assert!(front.register(worker.info.clone()).await.accepted);
    (front, worker)
}

/// An answer may end within its thoughts.
#[tokio::test]
async fn thoughts_that_come_at_once_come_at_the_end_of_an_answer_without_text() {
    let long = "so ".repeat(15_000);
    let (front, _worker) = front_that_thinks(says(&format!("<think>{long}"))).await;
    let body = asking(&json!({"stream_reasoning": false, "stream": true, "max_tokens": 100_000}));
    let stream = front.post(CHAT, &body).await.text().await;
    let events = stream.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
    let events: Vec<Value> = events.filter_map(|data| serde_json::from_str(data).ok()).collect();
    let (text, thoughts, ..) = joined(&events);
    assert_eq!((text.as_str(), thoughts.as_str()), ("", long.trim_end()));
    let some = |event: &&Value| event["choices"][0]["delta"].get("reasoning_content").is_some();
    assert_eq!(events.iter().filter(some).count(), 2, "an event has 32 KiB of thoughts at most");
}

#[tokio::test]
async fn thoughts_that_wait_count_in_the_share_of_their_client() {
    const HELD: usize = 60_000;
    let thoughts = "<think>".bytes().chain(std::iter::repeat_n(b'x', HELD));
    let thinks = thoughts.map(|byte| Step::Token(byte.into())).chain([Step::Hang]);
    let (front, _worker) = front_that_thinks(steps(thinks.collect())).await;
    let body = asking(&json!({"stream_reasoning": false, "stream": true, "max_tokens": 100_000}));
    let reply = front.post(CHAT, &body).await;
    answered_until("the bytes of answers that wait", async || {
        let metrics = front.get("/metrics").await.text().await;
        let bytes = metrics.lines().find_map(|line| line.strip_prefix("host_answer_bytes "));
        let bytes: usize = bytes.unwrap().parse().unwrap();
        // A few KiB of each answer do not count.
        if bytes >= HELD / 2 { Ok(()) } else { Err(bytes) }
    })
    .await;
    drop(reply);
    front.until_metrics_say("host_answer_bytes 0\n").await;
}

/// The template for Gemma 3 that is among the examples.
const GEMMA: &str = include_str!("../../../../examples/chat-templates/gemma-3.jinja");

#[tokio::test]
async fn gemma_calls_tools_with_the_template_among_the_examples() {
    let said = "I look.\n```tool_code\nweather(place=\"Oslo\")\nweather(place='Rome')\n```\n";
    let mut config = config();
    config.text.template =
        Some(Arc::new(ChatTemplate::new(GEMMA.into(), "<bos>".into(), String::new()).unwrap()));
    let mut front = Front::start(config).await;
    let _prefill = front.worker_for(4096, "prefill-0", "prefill", prefills()).await;
    let decode = front.worker_for(4096, "decode-0", "decode", says(said)).await;

    let answer = front.post(CHAT, &asking(&json!({}))).await.json().await;
    let choice = &answer["choices"][0];
    let message = &choice["message"];
    assert_eq!(
        (&message["content"], &choice["finish_reason"]),
        (&json!("I look."), &json!("tool_calls")),
        "{answer}"
    );
    let arguments: Vec<&Value> =
        message["tool_calls"].as_array().unwrap().iter().map(|call| &call["function"]["arguments"]).collect();
    assert_eq!(arguments, [&json!("{\"place\":\"Oslo\"}"), &json!("{\"place\":\"Rome\"}")]);
    let events = front.post(CHAT, &asking(&json!({"stream": true}))).await.events().await;
    let (text, _, calls, reason) = joined(&events);
    assert_eq!((text.as_str(), calls.len(), reason), ("I look.", 2, json!("tool_calls")));

    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I look.", "tool_calls": [{"id": "a", "type": "function",
            "function": {"name": "weather", "arguments": "{\"place\": \"Oslo\", \"days\": [2, true]}"}}]},
        {"role": "tool", "tool_call_id": "a", "content": "cold"},
        {"role": "developer", "content": "Now."},
    ]);
    let more = json!({"messages": messages, "tool_choice": "required"});
    assert_eq!(front.post(CHAT, &asking(&more)).await.status, 200);
    let (prompt, grammar) = given(&decode);
    assert!(prompt.starts_with("<bos><start_of_turn>user\nYou can call functions."), "{prompt}");
    assert!(prompt.contains("The functions are:\n{\"name\": \"weather\", "), "{prompt}");
    let end = "}\n\nBe brief.\n\nhi<end_of_turn>\n\
        <start_of_turn>model\nI look.\n```tool_code\nweather(place=\"Oslo\", days=[2, true])\n```<end_of_turn>\n\
        <start_of_turn>user\n```tool_output\ncold\n```\n\nNow.<end_of_turn>\n\
        <start_of_turn>model\n";
    assert!(prompt.ends_with(end), "{prompt}");
    assert!(grammar.unwrap().starts_with("start: \"```tool_code\\n\" call (\"\\n\" call)*"));
    // Without tools, the prompt is that of Gemma's own template.
    let messages = json!([{"role": "system", "content": "Be."}, {"role": "user", "content": "hi"}]);
    assert_eq!(front.post(CHAT, &json!({"messages": messages})).await.status, 200);
    let expected = "<bos><start_of_turn>user\nBe.\n\nhi<end_of_turn>\n<start_of_turn>model\n";
    assert_eq!(given(&decode).0, expected);
}

/// A short form of Qwen3-Coder's template: it writes arguments as tags, and earlier calls as the model wrote them.
const TAGS: &str = "{% for tool in tools %}<function=...>[{{ tool.function.name }}]{% endfor %}\
{% for message in messages %}<{{ message.role }}>{{ message.content + '' }}{% for call in message.tool_calls %}{{ '\n' }}<tool_call>\n\
<function={{ call.function.name }}>\n{% for name, value in call.function.arguments|items %}<parameter={{ name }}>\n\
{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}{% endfor %}<assistant>";
const TAGGED: &str = "\n<tool_call>\n<function=weather>\n<parameter=place>\nNew\n\"York\"\n</parameter>\n</function>\n</tool_call>";

#[tokio::test]
async fn calls_in_tags_are_read_and_the_next_turn_begins_with_them() {
    let (front, _prefill, decode) = front(TAGS, false, &format!("Sure.{TAGGED}")).await;
    let arguments = json!("{\"place\": \"New\\n\\\"York\\\"\"}");
    let answer = front.post(CHAT, &asking(&json!({}))).await.json().await;
    let choice = &answer["choices"][0];
    let message = &choice["message"];
    assert_eq!(
        (&message["content"], &choice["finish_reason"]),
        (&json!("Sure."), &json!("tool_calls")),
        "{answer}"
    );
    assert_eq!(message["tool_calls"][0]["function"], json!({"name": "weather", "arguments": arguments}));
    let events = front.post(CHAT, &asking(&json!({"stream": true}))).await.events().await;
    let (text, _, calls, reason) = joined(&events);
    assert_eq!((text.as_str(), reason), ("Sure.", json!("tool_calls")));
    assert_eq!(calls[0]["function"], json!({"name": "weather", "arguments": arguments}));

    let messages = json!([{"role": "user", "content": "hi"}, message]);
    assert_eq!(front.post(CHAT, &asking(&json!({"messages": messages}))).await.status, 200);
    let prompt = given(&decode).0;
    assert!(prompt.ends_with(&format!("<user>hi<assistant>Sure.{TAGGED}<assistant>")), "{prompt}");

    let required = asking(&json!({"tool_choice": "required"}));
    assert_eq!(front.post(CHAT, &required).await.status, 200);
    let grammar = given(&decode).1.unwrap();
    assert!(grammar.contains("<tool_call>\\n<function=weather>\\n"), "{grammar}");
}

#[tokio::test]
async fn a_choice_of_none_shows_the_tools_and_reads_no_call() {
    let (front, _prefill, decode) = front(TEMPLATE, false, TWO_CALLS).await;
    let answer = front.post(CHAT, &asking(&json!({"tool_choice": "none"}))).await.json().await;
    let message = &answer["choices"][0]["message"];
    assert_eq!((&message["content"], message.get("tool_calls")), (&json!(TWO_CALLS), None));
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert!(
        given(&decode).0.contains("weather"),
        "the prompt is that of other turns, so that its pages are found"
    );
}

#[tokio::test]
async fn a_call_that_is_demanded_is_held_to_a_grammar() {
    let (front, _prefill, decode) = front(
        TEMPLATE,
        false,
        "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"place\": \"x\"}}\n</tool_call>",
    )
    .await;
    let named = json!({"type": "function", "function": {"name": "weather"}});
    for (choice, reason, several) in [(json!("required"), "tool_calls", true), (named, "stop", false)] {
        let answer = front.post(CHAT, &asking(&json!({"tool_choice": choice}))).await.json().await;
        let found = &answer["choices"][0];
        assert_eq!(
            (&found["finish_reason"], &found["message"]["content"]),
            (&json!(reason), &Value::Null),
            "{answer}"
        );
        assert_eq!(found["message"]["tool_calls"][0]["function"]["name"], "weather");
        let grammar = given(&decode).1.unwrap();
        assert!(grammar.contains("call_0: \"<tool_call>\\n") && grammar.contains("\"place\""), "{grammar}");
        assert_eq!(grammar.contains(")*"), several, "{grammar}");
    }
}

#[tokio::test]
async fn calls_and_results_of_earlier_turns_reach_the_template() {
    let (front, _prefill, decode) = front(TEMPLATE, false, "fine").await;
    let messages = json!([
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "call_1", "type": "function",
            "function": {"name": "weather", "arguments": "{\"z\": 1, \"a\": 2}"}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "cold"}]},
        {"role": "assistant", "content": "It is cold.", "tool_calls": []},
        {"role": "user", "content": "thanks"},
    ]);
    let reply = front.post(CHAT, &asking(&json!({"messages": messages}))).await;
    assert_eq!(reply.status, 200);
    let prompt = given(&decode).0;
    let end = "<user>hi<assistant><tool_call>{\"name\": \"weather\", \"arguments\": {\"z\": 1, \"a\": 2}}</tool_call><tool>cold<assistant>It is cold.<user>thanks<assistant>";
    assert!(prompt.ends_with(end), "{prompt}");
}

#[tokio::test]
async fn arguments_that_are_no_object_come_back_to_the_model_as_it_wrote_them() {
    let (front, _prefill, decode) = front(TEMPLATE, false, "fine").await;
    for (arguments, shown) in [
        ("{\"place\": \"Os", r#"{"arguments": "{\"place\": \"Os"}"#),
        ("[1]", r#"{"arguments": "[1]"}"#),
        (" ", "{}"),
    ] {
        let messages = json!([
            {"role": "assistant", "tool_calls": [{"id": "a", "type": "function",
                "function": {"name": "weather", "arguments": arguments}}]},
            {"role": "tool", "tool_call_id": "a", "content": "bad arguments"},
        ]);
        let reply = front.post(CHAT, &asking(&json!({"messages": messages}))).await;
        assert_eq!(reply.status, 200);
        let prompt = given(&decode).0;
        assert!(prompt.contains(&format!("\"arguments\": {shown}}}</tool_call>")), "{prompt}");
    }
}

#[tokio::test]
async fn an_answer_with_a_structure_may_call_tools_instead() {
    let (front, _prefill, decode) = front(TEMPLATE, false, "x").await;
    let format = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"sum": {"type": "integer"}}}}});
    for (choice, calls) in [("auto", true), ("none", false)] {
        let more = json!({"response_format": format, "tool_choice": choice});
        assert_eq!(front.post(CHAT, &asking(&more)).await.status, 200);
        let grammar = given(&decode).1.unwrap();
        assert!(grammar.contains("\"sum\""), "{grammar}");
        assert_eq!(grammar.starts_with("start: first | second\n"), calls, "{grammar}");
        assert_eq!(grammar.contains("<tool_call>"), calls, "{grammar}");
    }
    // An answer that must be a call has no text that the structure could limit.
    let more = json!({"response_format": format, "tool_choice": "required"});
    assert_eq!(front.post(CHAT, &asking(&more)).await.status, 200);
    let grammar = given(&decode).1.unwrap();
    assert!(grammar.contains("weather") && !grammar.contains("sum"), "{grammar}");
    // Calls that begin as JSON does cannot be told from it.
    let dialect = Dialect { thinks: false, calls: Some(CallFormat::Llama) };
    let (llama, _prefill, other) = front_of(TEMPLATE, dialect, "x").await;
    assert_eq!(llama.post(CHAT, &asking(&json!({"response_format": format}))).await.status, 200);
    assert!(!given(&other).1.unwrap().contains("first"));
    // A client's own rules stay as they are.
    let rules = "start: call\ncall: \"a\"";
    assert_eq!(
        front.post(CHAT, &asking(&json!({"structured_outputs": {"grammar": rules}}))).await.status,
        200
    );
    assert_eq!(given(&decode).1.unwrap(), rules);
    // Some servers take a schema with `json_object`.
    let more = json!({"response_format": {"type": "json_object", "schema": {"enum": ["b"]}}, "tools": []});
    assert_eq!(front.post(CHAT, &asking(&more)).await.status, 200);
    assert_eq!(given(&decode).1.unwrap(), r#"{"enum":["b"]}"#);
}

#[tokio::test]
async fn fields_about_thoughts_reach_the_template_or_change_nothing() {
    let template =
        "{{ reasoning_effort }}{% if enable_thinking is false %}, silent{% endif %}{{ messages[0].content }}";
    let template = format!("{template}{{% if thinking %}}!{{% endif %}}");
    let (front, _prefill, decode) = front(&template, false, "x").await;
    let ask = async |more: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "."}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        assert_eq!(front.post(CHAT, &body).await.status, 200, "{more}");
        given(&decode).0
    };
    assert_eq!(ask(json!({"reasoning_effort": "low", "verbosity": "low"})).await, "low.");
    assert_eq!(ask(json!({"reasoning_effort": "none", "separate_reasoning": true})).await, "none, silent.");
    let more = json!({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": true}});
    assert_eq!(ask(more).await, "none.");
    assert_eq!(ask(json!({"include_reasoning": true, "stream_reasoning": true})).await, ".");
    assert_eq!(ask(json!({"enable_thinking": false})).await, ", silent.");
    let more = json!({"enable_thinking": false, "chat_template_kwargs": {"enable_thinking": true}});
    assert_eq!(ask(more).await, ".");
    assert_eq!(ask(json!({"thinking": false})).await, ".");
    assert_eq!(ask(json!({"thinking": {"type": "disabled"}})).await, ", silent.");
    assert_eq!(ask(json!({"thinking": {"type": "enabled"}})).await, ".!");
    assert_eq!(ask(json!({"thinking": {"type": "enabled"}, "enable_thinking": false})).await, ", silent.!");
    for (thinking, words) in [
        (json!({"type": "often"}), "thinking.type must be enabled or disabled"),
        (json!("yes"), "thinking must be a JSON object"),
        (json!({"type": "enabled", "budget_tokens": 5}), "thinking.budget_tokens is not known here"),
    ] {
        let body = json!({"messages": [{"role": "user", "content": "."}], "thinking": thinking});
        let reply = front.post(CHAT, &body).await;
        let (status, text) = (reply.status, reply.text().await);
        assert!(status == 400 && text.contains(words), "{status} {text}");
    }
}

/// litellm sends this when a turn ended within the model's thoughts.
#[tokio::test]
async fn a_message_of_the_assistant_that_says_nothing_is_taken() {
    let (front, _prefill, decode) = front(TEMPLATE, false, "x").await;
    let messages = json!([
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": null, "thinking_blocks": [{"type": "thinking", "thinking": "hm"}]},
        {"role": "user", "content": "again"},
    ]);
    let reply = front.post(CHAT, &asking(&json!({"messages": messages}))).await;
    assert_eq!(reply.status, 200);
    assert!(given(&decode).0.contains("again"));
}

#[tokio::test]
async fn the_tokens_of_a_conversation_are_counted_with_its_tools() {
    let (front, _prefill, decode) = front(TEMPLATE, false, "x").await;
    // The body of a chat, without what is about the answer alone.
    let asked = asking(&json!({"tool_choice": "auto", "parallel_tool_calls": false}));
    assert_eq!(front.post(CHAT, &asked).await.status, 200);
    let prompt = decode.watch.calls().pop().unwrap().prompt;
    let answer = front.post("/tokenize", &asked).await.json().await;
    assert_eq!((&answer["tokens"], &answer["count"]), (&json!(prompt), &json!(prompt.len())));
    let mut plain = asked.clone();
    plain.as_object_mut().unwrap().remove("tools");
    let answer = front.post("/tokenize", &plain).await.json().await;
    assert!(answer["count"].as_u64().unwrap() < prompt.len() as u64, "{answer}");
    for (body, words) in [
        (json!({"prompt": "a", "tools": weather()}), "send messages in the place of prompt"),
        (asking(&json!({"tools": [{"type": "function"}]})), "tools[0] must be"),
    ] {
        let reply = front.post("/tokenize", &body).await;
        let (status, error) = (reply.status, reply.json().await["error"].clone());
        assert_eq!(status, 400, "{body}: {error}");
        assert!(error["message"].as_str().unwrap().contains(words), "{body}: {error}");
    }
    assert_eq!(front.post("/tokenize", &json!({"prompt": "a", "tools": []})).await.status, 200);
}

#[tokio::test]
async fn gateways_learn_how_answers_are_read_by_sglangs_names() {
    let format = |calls| Dialect { thinks: false, calls: Some(calls) };
    for (dialect, template, tools, thoughts) in [
        (Dialect::default(), super::fixture::TEMPLATE, Value::Null, Value::Null),
        (Dialect { thinks: true, calls: None }, TEMPLATE, json!("hermes"), json!("qwen3")),
        (format(CallFormat::Qwen3Coder), TEMPLATE, json!("qwen3_coder"), Value::Null),
        (format(CallFormat::Gemma), TEMPLATE, Value::Null, Value::Null),
    ] {
        let (front, _prefill, _decode) = front_of(template, dialect, "x").await;
        let info = front.get("/model_info").await.json().await;
        assert_eq!(
            (&info["tool_call_parser"], &info["reasoning_parser"]),
            (&tools, &thoughts),
            "{dialect:?}"
        );
        assert!(info.as_object().unwrap().contains_key("tool_call_parser"), "{info}");
    }
}

#[tokio::test]
async fn what_cannot_be_done_is_said_in_a_sentence() {
    let (plain, _prefill, _decode) = front(super::fixture::TEMPLATE, false, "x").await;
    let (unknown, _prefill, _decode) = front("{{ tools }}{{ messages }}", false, "x").await;
    let (able, _prefill, _decode) = front(TEMPLATE, false, "x").await;
    let bad_schema = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "strange"}}}}}]);
    let wide: serde_json::Map<String, Value> = (0..513).map(|at| (format!("a{at}"), json!({}))).collect();
    let wide =
        json!([{"type": "function", "function": {"name": "wide", "parameters": {"properties": wide}}}]);
    for (front, more, words) in [
        (&plain, json!({}), "has no place for them"),
        (&able, json!({"tools": wide}), "the tool wide has 513 properties; at most 512 are taken"),
        (
            &plain,
            json!({"tools": [], "messages": [{"role": "tool", "content": "x"}]}),
            "calls of tools and their results",
        ),
        (
            &able,
            json!({"messages": vec![json!({"role": "user", "content": ""}); 4097]}),
            "messages has 4097 messages and calls; at most 4096 are taken",
        ),
        (
            &able,
            json!({"chat_template_kwargs": {"tools": vec![json!({"function": {}}); 2049]}}),
            "chat_template_kwargs has lists and objects with 4098 entries; at most 4096 are taken",
        ),
        (&unknown, json!({}), "--tool-parser"),
        (&able, json!({"tool_choice": "other"}), "tool_choice must be"),
        (
            &able,
            json!({"tool_choice": {"type": "function", "function": {"name": "f"}}}),
            "not among the tools",
        ),
        (
            &able,
            json!({"tools": [{"type": "function", "function": {"name": "a b"}}]}),
            "tools[0].function.name",
        ),
        (&able, json!({"tools": [{"type": "web_search"}]}), "tools[0] must be"),
        (
            &able,
            json!({"tools": bad_schema, "tool_choice": "required"}),
            "tools[0].function.parameters: the JSON schema",
        ),
        (
            &able,
            json!({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}]}),
            "must be a JSON object",
        ),
    ] {
        let reply = front.post(CHAT, &asking(&more)).await;
        let (status, text) = (reply.status, reply.text().await);
        assert!(status == 400 && text.contains(words), "{more}: {status} {text}");
    }
    // These requests ask for nothing that the model cannot do.
    for more in [json!({"tool_choice": "none"}), json!({"tools": [], "tool_choice": "auto"})] {
        assert_eq!(plain.post(CHAT, &asking(&more)).await.status, 200, "{more}");
    }
}

#[tokio::test]
async fn an_answer_cut_by_its_length_leaves_its_call_as_it_is() {
    let mut config = config();
    config.text.template =
        Some(Arc::new(ChatTemplate::new(TEMPLATE.into(), String::new(), String::new()).unwrap()));
    let mut front = Front::start(config).await;
    let _prefill = front.worker("prefill-0", "prefill", prefills()).await;
    let cut = "<tool_call>{\"name\": \"weather\", \"arguments\": {\"place\": \"Os";
    let said = cut.bytes().map(|byte| Step::Token(byte.into())).chain([Step::Finish("length")]).collect();
    let _decode = front.worker("decode-0", "decode", steps(said)).await;
    let answer = front.post(CHAT, &asking(&json!({}))).await.json().await;
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(choice["message"]["tool_calls"][0]["function"]["arguments"], "{\"place\": \"Os");
}
