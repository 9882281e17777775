//! The answers that clients read when no failure occurs.

use host_front::front::FrontConfig;
use host_front::text::{ByteTokenizer, TextModel};
use serde_json::{Value, json};

use super::fake_worker::{Script, Step, echoes, says, steps};
use super::fixture::{Front, config};
use super::gated::Gated;

const PATH: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn text_of(events: &[Value]) -> String {
    events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect()
}

fn content_of(events: &[Value]) -> String {
    events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect()
}

/// A request for either path.
fn asking(path: &str) -> Value {
    if path == PATH {
        json!({"model": "fake", "prompt": "p"})
    } else {
        json!({"model": "fake", "messages": [{"role": "user", "content": "p"}]})
    }
}

/// A script that says these tokens and ends.
fn tokens(tokens: &[u32]) -> Script {
    steps(tokens.iter().map(|&token| Step::Token(token)).chain([Step::Finish("stop")]).collect())
}

#[tokio::test]
async fn a_completion_comes_whole_with_usage_and_reason() {
    let (front, prefill, decode) = Front::echoing().await;
    let body = json!({"model": "fake", "prompt": "abc", "max_tokens": 7, "seed": 5, "temperature": 0, "user": "ignored"});
    let reply = front.post(PATH, &body).await;
    assert_eq!(reply.status, 200);
    assert!(reply.header("x-request-id").is_some());
    let answer = reply.json().await;
    assert_eq!(answer["choices"][0]["text"], "abcabca");
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["choices"][0]["logprobs"], Value::Null);
    assert_eq!(answer["object"], "text_completion");
    let usage = json!({"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 3}});
    assert_eq!(answer["usage"], usage);

    // Decode may have answered before prefill was reached.
    prefill.watch.begun(1).await;
    let (to_prefill, to_decode) = (prefill.watch.calls().remove(0), decode.watch.calls().remove(0));
    assert_eq!(to_prefill.room, to_decode.room);
    assert!(to_decode.room < 1 << 63);
    assert_eq!((to_prefill.prefill, to_decode.prefill.unwrap().instance), (None, prefill.info.instance));
    assert_eq!(to_decode.sampling.as_ref().unwrap().seed, 5);
    assert_eq!(to_prefill.sampling, to_decode.sampling);
}

#[tokio::test]
async fn a_text_begins_with_the_models_special_tokens_unless_the_request_says_otherwise() {
    let gate = Gated::beginning_with(ByteTokenizer::BOS);
    gate.open();
    let text = TextModel { tokenizer: gate, template: None, end: Vec::new(), dialect: Default::default() };
    let mut front = Front::start(FrontConfig { text, ..config() }).await;
    let worker = front.worker("all", "aggregated", echoes()).await;
    let (with, without) = (vec![ByteTokenizer::BOS, 97], vec![97]);
    for (special, prompt) in [(Value::Null, &with), (json!(true), &with), (json!(false), &without)] {
        let body = json!({"prompt": "a", "max_tokens": 1, "add_special_tokens": special});
        assert_eq!(front.post(PATH, &body).await.status, 200);
        assert_eq!(worker.watch.calls().pop().unwrap().prompt, *prompt, "{special}");
    }
}

#[tokio::test]
async fn streaming_gives_the_same_text_as_not_streaming() {
    // "é漢🦀" cut into single bytes, invalid bytes between, and a special token.
    let odd: Vec<u32> =
        ["é漢🦀", "x"].concat().bytes().map(u32::from).chain([0xff, 0xe2, 65, 257, 0xf0]).collect();
    let (front, _prefill, _decode) = Front::with_pair(tokens(&odd)).await;
    for path in [PATH, CHAT] {
        let mut body = asking(path);
        let whole = front.post(path, &body).await.json().await;
        body["stream"] = json!(true);
        let reply = front.post(path, &body).await;
        assert_eq!(reply.header("content-type"), Some("text/event-stream"));
        let events = reply.events().await;
        assert_eq!(events.last().unwrap(), "[DONE]");
        let expected = "é漢🦀x\u{fffd}\u{fffd}A\u{fffd}";
        if path == PATH {
            assert_eq!(whole["choices"][0]["text"], expected);
            assert_eq!(text_of(&events), expected);
        } else {
            assert_eq!(
                whole["choices"][0]["message"],
                json!({"role": "assistant", "content": expected, "refusal": null})
            );
            assert_eq!(content_of(&events), expected);
            assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
        }
        let reasons: Vec<&Value> = events
            .iter()
            .map(|event| &event["choices"][0]["finish_reason"])
            .filter(|reason| !reason.is_null())
            .collect();
        assert_eq!(reasons, ["stop"]);
        assert!(events.iter().all(|event| event.get("usage").is_none()), "usage was not requested");
    }
}

#[tokio::test]
async fn usage_comes_last_when_requested() {
    let (front, _prefill, _decode) = Front::echoing().await;
    for path in [PATH, CHAT] {
        let mut body = asking(path);
        body["max_tokens"] = json!(3);
        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
        let events = front.post(path, &body).await.events().await;
        let [before @ .., usage, done] = events.as_slice() else { panic!("{events:?}") };
        assert_eq!(done, "[DONE]");
        assert_eq!(usage["choices"], json!([]));
        assert_eq!(usage["usage"]["completion_tokens"], 3);
        assert!(before.iter().all(|event| event["usage"].is_null() && event.get("usage").is_some()));
    }
}

#[tokio::test]
async fn stop_strings_end_the_answer_across_tokens_and_the_worker_is_told_that_it_is_complete() {
    let text: Vec<Step> =
        "one TWO three".bytes().map(|byte| Step::Token(byte.into())).chain([Step::Hang]).collect();
    for stream in [false, true] {
        let (front, _prefill, decode) = Front::with_pair(steps(text.clone())).await;
        let body = json!({"prompt": "p", "max_tokens": 99, "stop": ["WO t", "zzz"], "stream": stream, "logprobs": 0});
        let reply = front.post(PATH, &body).await;
        if stream {
            let events = reply.events().await;
            assert_eq!(text_of(&events), "one T");
            assert_eq!(events[events.len() - 2]["choices"][0]["finish_reason"], "stop");
            let shown: Vec<&Value> = events
                .iter()
                .filter_map(|event| event["choices"][0]["logprobs"]["tokens"].as_array())
                .flatten()
                .collect();
            assert_eq!(shown, ["o", "n", "e", " ", "T"], "tokens of the stop string do not show");
        } else {
            let answer = reply.json().await;
            assert_eq!(answer["choices"][0]["text"], "one T");
            assert_eq!(answer["choices"][0]["finish_reason"], "stop");
            assert_eq!(answer["choices"][0]["logprobs"]["tokens"], json!(["o", "n", "e", " ", "T"]));
        }
        decode.watch.ended(1).await;
        front.until_metrics_say("host_requests_running 0\n").await;
        assert_eq!(decode.watch.cancelled_by_now(), 0, "it is no cancelled request there");
    }
}

#[tokio::test]
async fn stop_strings_within_the_first_tokens_do_not_end_an_answer_that_must_be_longer() {
    let (front, _prefill, _decode) = Front::with_pair(says("a.b.c.d")).await;
    for (least, text) in [(0, "a"), (1, "a"), (2, "a.b"), (4, "a.b.c"), (7, "a.b.c.d")] {
        let body = json!({"prompt": "p", "max_tokens": 9, "min_tokens": least, "stop": "."});
        let answer = front.post(PATH, &body).await.json().await;
        assert_eq!(answer["choices"][0]["text"], text, "{least}");
    }
}

#[tokio::test]
async fn text_that_only_looked_like_a_stop_string_is_shown() {
    let (front, _prefill, _decode) = Front::with_pair(says("one TW")).await;
    let answer = front.post(PATH, &json!({"prompt": "p", "stop": "TWO"})).await.json().await;
    assert_eq!(answer["choices"][0]["text"], "one TW");
}

#[tokio::test]
async fn a_stop_string_is_seen_in_what_only_the_end_makes_certain() {
    let (front, _prefill, _decode) = Front::with_pair(tokens(&[65, 0xe2])).await;
    let body = json!({"prompt": "p", "stop": "\u{fffd}", "logprobs": 0});
    let answer = front.post(PATH, &body).await.json().await;
    assert_eq!(answer["choices"][0]["text"], "A");
    assert_eq!(answer["choices"][0]["logprobs"]["tokens"], json!(["A"]));
}

#[tokio::test]
async fn end_tokens_stop_and_do_not_show_unless_ignored() {
    let (front, _prefill, _decode) = Front::echoing().await;
    let mut body = json!({"prompt": [97, 98, 99], "max_tokens": 5, "stop_token_ids": [98]});
    let answer = front.post(PATH, &body).await.json().await;
    assert_eq!(
        (&answer["choices"][0]["text"], &answer["choices"][0]["finish_reason"]),
        (&json!("a"), &json!("stop"))
    );
    assert_eq!(answer["usage"]["completion_tokens"], 2);
    assert_eq!(answer["choices"][0]["stop_reason"], 98);
    body["include_stop_str_in_output"] = json!(true);
    let answer = front.post(PATH, &body).await.json().await;
    assert_eq!(answer["choices"][0]["text"], "ab");
    // The model's own end tokens are ignored, but the stop tokens of the request are not.
    body["ignore_eos"] = json!(true);
    let answer = front.post(PATH, &body).await.json().await;
    assert_eq!(answer["choices"][0]["text"], "ab");
    body["stop_token_ids"] = json!([]);
    let answer = front.post(PATH, &body).await.json().await;
    assert_eq!(answer["choices"][0]["text"], "abcab");
}

#[tokio::test]
async fn logprobs_have_openais_shapes() {
    let (front, _prefill, _decode) = Front::with_pair(tokens(&[65, 0xc3, 0xa9])).await;
    let answer = front.post(PATH, &json!({"prompt": "p", "logprobs": 2})).await.json().await;
    let expected = json!({
        "tokens": ["A", "bytes:\\xc3", "bytes:\\xa9"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [{"A": -0.5, "B": -1.5}, {"bytes:\\xc3": -0.5, "bytes:\\xc4": -1.5},
            {"bytes:\\xa9": -0.5, "bytes:\\xaa": -1.5}],
        "text_offset": [0, 1, 1],
    });
    assert_eq!(answer["choices"][0]["logprobs"], expected);

    let body = json!({"messages": [{"role": "user", "content": "x"}], "logprobs": true, "top_logprobs": 1});
    let answer = front.post(CHAT, &body).await.json().await;
    let content = &answer["choices"][0]["logprobs"]["content"];
    let first = json!({"token": "A", "logprob": -0.5, "bytes": [65],
        "top_logprobs": [{"token": "A", "logprob": -0.5, "bytes": [65]}]});
    assert_eq!(content[0], first);
    assert_eq!(content.as_array().unwrap().len(), 3);
}

#[tokio::test]
async fn chat_renders_the_template_and_may_use_what_is_left_of_the_context() {
    let (front, _prefill, decode) = Front::with_pair(says("hi")).await;
    let body = json!({"model": "fake", "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]});
    let answer = front.post(CHAT, &body).await.json().await;
    assert_eq!(answer["choices"][0]["message"]["content"], "hi");
    let call = decode.watch.calls().remove(0);
    let prompt: Vec<u8> = call.prompt.iter().map(|&token| u8::try_from(token).unwrap()).collect();
    assert_eq!(String::from_utf8(prompt).unwrap(), "<system>be brief<user>a\nb<assistant>");
    assert_eq!(call.max_new_tokens as usize, 512 - call.prompt.len());
}

#[tokio::test]
async fn chat_without_a_length_asks_for_the_default_and_not_the_whole_context() {
    for (default, expected) in [(100, 100), (100_000, 512 - "<user>p<assistant>".len())] {
        let mut config = config();
        config.default_max_tokens = default;
        let mut front = Front::start(config).await;
        let worker = front.worker("all", "aggregated", says("hi")).await;
        assert_eq!(front.post(CHAT, &asking(CHAT)).await.status, 200);
        assert_eq!(worker.watch.calls()[0].max_new_tokens as usize, expected);
        let mut body = asking(CHAT);
        body["max_tokens"] = json!(300);
        assert_eq!(front.post(CHAT, &body).await.status, 200);
        assert_eq!(worker.watch.calls()[1].max_new_tokens, 300, "a number that is given counts");
    }
}

#[tokio::test]
async fn chat_leaves_the_assistants_turn_out_when_requested() {
    let mut config = config();
    let template = "{{ messages[0].content }}{% if add_generation_prompt %}<assistant>{% endif %}";
    let template =
        host_front::text::ChatTemplate::new(template.into(), String::new(), String::new()).unwrap();
    config.text.template = Some(std::sync::Arc::new(template));
    let mut front = Front::start(config).await;
    let worker = front.worker("all", "aggregated", says("hi")).await;
    for (add, prompt) in [(json!(null), "p<assistant>"), (json!(true), "p<assistant>"), (json!(false), "p")] {
        let mut body = asking(CHAT);
        body["add_generation_prompt"] = add;
        assert_eq!(front.post(CHAT, &body).await.status, 200);
        let call = worker.watch.calls().pop().unwrap();
        assert_eq!(call.prompt, prompt.bytes().map(u32::from).collect::<Vec<_>>());
    }
}

#[tokio::test]
async fn generate_answers_in_sglangs_shape_with_the_workers_that_served_it() {
    let (front, _prefill, _decode) = Front::echoing().await;
    let mut body = json!({"input_ids": [104, 105], "return_logprob": true,
        "sampling_params": {"max_new_tokens": 3, "temperature": 0.0, "sampling_seed": 9}});
    let answer = front.post("/generate", &body).await.json().await;
    assert_eq!((&answer["text"], &answer["output_ids"]), (&json!("hih"), &json!([104, 105, 104])));
    let meta = &answer["meta_info"];
    assert_eq!(meta["finish_reason"], json!({"type": "length", "length": 3}));
    assert_eq!((&meta["prompt_tokens"], &meta["completion_tokens"]), (&json!(2), &json!(3)));
    assert_eq!((&meta["cached_tokens"], &meta["transferred_bytes"]), (&json!(3), &json!(4096)));
    assert_eq!(meta["sampling_seed"], json!(9));
    assert_eq!(
        (&meta["transfer_plugin"], &meta["prefill_worker"], &meta["decode_worker"]),
        (&json!("shm"), &json!("prefill-0"), &json!("decode-0"))
    );
    assert_eq!(meta["output_token_logprobs"][1], json!([-0.5, 105, "i"]));
    assert!(meta["ttft"].as_f64().unwrap() <= meta["e2e_latency"].as_f64().unwrap());

    // A seed that the router drew is told, and each answer has its own.
    let unseeded = json!({"input_ids": [104], "sampling_params": {"max_new_tokens": 1, "n": 2}});
    let answers = front.post("/generate", &unseeded).await.json().await;
    let seed = |number: usize| answers[number]["meta_info"]["sampling_seed"].as_i64().unwrap();
    assert_eq!(seed(1), seed(0).wrapping_add(1));

    body["stream"] = json!(true);
    let events = front.post("/generate", &body).await.events().await;
    let [.., last, done] = events.as_slice() else { panic!("{events:?}") };
    assert_eq!(
        (done, &last["text"], &last["output_ids"]),
        (&json!("[DONE]"), &answer["text"], &answer["output_ids"])
    );
    assert_eq!(events[0]["output_ids"], json!([104]));
}

#[tokio::test]
async fn a_request_keeps_its_id_and_a_bad_id_is_replaced() {
    let (front, _prefill, decode) = Front::echoing().await;
    let body = json!({"prompt": "a"}).to_string();
    for (sent, kept) in [("my-id-1", true), ("has space", false)] {
        let reply =
            super::client::send(front.http, "POST", PATH, &[("x-request-id", sent)], body.as_bytes()).await;
        assert_eq!(reply.header("x-request-id") == Some(sent), kept);
    }
    assert_eq!(decode.watch.calls()[0].request_id, "my-id-1");
    assert_eq!(front.get("/nowhere").await.header("x-request-id").unwrap().len(), 16);
}

#[tokio::test]
async fn an_aggregated_worker_serves_alone() {
    let mut front = Front::start(config()).await;
    let worker = front.worker("all-0", "aggregated", says("hello")).await;
    let answer = front.post(PATH, &json!({"prompt": "p"})).await.json().await;
    assert_eq!(answer["choices"][0]["text"], "hello");
    assert_eq!(worker.watch.calls()[0].prefill, None);
}
