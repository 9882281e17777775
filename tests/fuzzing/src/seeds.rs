//! Seeds of the fuzz targets: small inputs, made by the product's own writers or written by hand.

use host_core::aux_row::AuxRow;
use host_core::message::{Body, Message, Reserve};
use host_core::notice::{LaneNotice, Notice, PieceNotice};
use host_core::radix::NamespaceKey;
use host_core::routing::{BlockKey, KvEvent, SnapshotPart};
use host_core::staging::message::{Answer, Ask, Message as StagingMessage, Refusal, Verdict};
use host_core::staging::{Key, Span};
use host_core::{PageId, Room, Sampled};
use host_tests::elf;
use host_wire::cache_news::{write_batch, write_part};
use host_wire::convert::write_message;
use host_wire::proto::{self, CacheNews};
use prost::Message as _;

#[path = "../../../gguf/tests/damage/damage.rs"]
mod gguf_files;

pub use gguf_files::Damage;

const MANIFEST: &str = r#"manifest_version = 1
[plugin]
id = "host.test.seed"
name = "seed"
version = "0.1.0"
description = "A seed"
threads = "own"
[[role]]
kind = "transfer"
memory = ["dram"]
capabilities = ["page_writes", "settled"]
[config.depth]
type = "integer"
default = 64
host_min = 1
doc = "Writes in flight."
[[companion]]
name = "master"
program = "sh"
arguments = ["-c", "exit {depth}"]
ready = "127.0.0.1:{depth}"
[api]
version = "VERSION"
[build]
panic = "unwind"
target = "TARGET"
rustc = "1.95.0"
symbol = "host_plugin_header"
"#;

const CONFIG: &str = r#"{"architectures":["Qwen3ForCausalLM"],"hidden_size":64,"num_attention_heads":4,
"num_key_value_heads":2,"head_dim":16,"num_hidden_layers":2,"intermediate_size":128,"vocab_size":300,
"max_position_embeddings":512,"rms_norm_eps":1e-6,"rope_theta":10000.0,"rope_scaling":{"rope_type":"llama3","factor":8.0,
"low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":256},"torch_dtype":"bfloat16"}"#;

const GEMMA: &str = r#"{"architectures":["Gemma3ForCausalLM"],"hidden_size":64,"num_attention_heads":4,
"num_key_value_heads":1,"head_dim":16,"num_hidden_layers":6,"intermediate_size":128,"vocab_size":300,
"max_position_embeddings":512,"sliding_window":32,"sliding_window_pattern":6,"query_pre_attn_scalar":16,
"rope_theta":1000000.0,"rope_local_base_freq":10000.0,"hidden_activation":"gelu_pytorch_tanh","tie_word_embeddings":true}"#;

const TEMPLATE: &str = "{% for message in messages %}{% if message.role == 'system' and loop.first %}<s>{{ message.content | trim }}\
{% else %}<{{ message['role'] }}>{{ message.content.split('x')[-1] }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}<assistant>{{ strftime_now('%Y') }}{{ messages | tojson }}{% endif %}";

/// A file of publishers, and a signature of the text `test` by the program minisign, from the tests of its Rust library.
const SIGNED: &str = "[[publisher]]\nname = \"acme\"\nkey = \"RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3\"\n\
plugins = [\"host.test.*\"]\n\0untrusted comment: signature from minisign secret key\n\
RUQf6LRCGA9i559r3g7V1qNyJDApGip8MfqcadIgT9CuhV3EMhHoN1mGTkUidF/z7SrlQgXdy8ofjb7bNJJylDOocrCo8KLzZwo=\n\
trusted comment: timestamp:1556193335\tfile:test\n\
y/rUw2y8/hOUYjZU71eHp/Wo1KZ40fGy2VJEDl34XMJM+TX48Ss/17u3IvIfbVR1FkZZSNCisQbuQY+bHwhEBg==\n\0test";

/// Seeds of a target, each accepted by it.
///
/// # Panics
/// When there is no such target.
#[must_use]
pub fn of(target: &str) -> Vec<Vec<u8>> {
    let text = |text: &str| text.as_bytes().to_vec();
    match target {
        "elf" => vec![plugin_file()],
        "manifest" => vec![[manifest().as_bytes(), b"\0depth = 7\n"].concat()],
        "side_car" => vec![text(&format!(
            "manifest_version = 1\n[[file]]\ntarget = \"{}\"\npath = \"x86_64/wire.so\"\nsha256 = \"{}\"\n",
            host_plugin_api::note::BUILT_FOR,
            "9f".repeat(32)
        ))],
        "lock" => vec![text(&format!(
            "[[plugin]]\nid = \"host.shm\"\nversion = \"0.1.0\"\ntarget = \"x86_64-unknown-linux-gnu\"\nfile = \"shm.so\"\n\
             sha256 = \"{0}\"\n[[plugin.library]]\nfile = \"lib/libone.so\"\nsha256 = \"{0}\"\n",
            "9f".repeat(32)
        ))],
        "signature" => vec![text(SIGNED)],
        "api_keys" => vec![text(&format!(
            "[[key]]\nname = \"a\"\nsha256 = \"{0}\"\nadmin = true\nmax_requests = 3\n[[key]]\nname = \"b\"\nsha256 = \"{1}\"\n",
            "9f".repeat(32),
            "0a".repeat(32)
        ))],
        "safetensors" => vec![safetensors()],
        "safetensors_index" => vec![text(
            r#"{"metadata":{"total_size":8},"weight_map":{"a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"}}"#,
        )],
        "config_json" => vec![text(CONFIG), text(GEMMA)],
        "gguf" => gguf_files::seeds(),
        "http_body" => bodies(),
        "chat_template" => vec![text(&format!(
            "{TEMPLATE}\0[{{\"role\":\"system\",\"content\":\" Be. \"}},{{\"role\":\"user\",\"content\":\"axb\"}}]"
        ))],
        "answer_text" => answers(),
        "grammar" => grammars(),
        "wire_shm" => host_plugin_shm::fuzzing::seeds(),
        "wire_nixl" => host_plugin_nixl::fuzzing::seeds(),
        "wire_mooncake" => host_plugin_mooncake::fuzzing::seeds(),
        "notice" => {
            let lane = lane();
            vec![lane.encode().to_vec(), PieceNotice { lane, generation: 9 }.encode().to_vec()]
        }
        "staging_message" => staging_messages(),
        "aux_row" => vec![aux_row()],
        "control_message" => control_messages(),
        "segment_index" => host_plugin_hicache_file::fuzzing::seeds(),
        "cache_news" => vec![news()],
        "scheduler" => vec![
            // Decode: a request, its transfer and its answer.
            vec![0, 0, 7, 3, 0, 1, 15, 7, 0, 8, 0, 0, 9, 9, 9, 9, 15, 9, 9, 15],
            // Prefill: a request, the reservation of target pages, the writes, and the end.
            vec![
                1, 0, 7, 3, 0, 1, 2, 0, 1, 0, 2, 0, 1, 0, 0, 8, 0, 0, 0, 1, 1, 9, 9, 11, 2, 0, 1, 3, 0, 1, 1,
                15,
            ],
        ],
        other => panic!("no target is named {other:?}"),
    }
}

/// Bodies of HTTP requests, each after a byte that selects the endpoint.
fn bodies() -> Vec<Vec<u8>> {
    let bodies: [(u8, &str); 14] = [
        (
            0,
            r#"{"model":"model","prompt":"Once","max_tokens":3,"temperature":0.5,"stop":["a"],"stream":true,"logprobs":1}"#,
        ),
        (
            1,
            r#"{"model":"model","messages":[{"role":"user","content":"Hi"}],"max_tokens":3,"seed":7,"logprobs":true,"top_logprobs":2}"#,
        ),
        (
            2,
            r#"{"input_ids":[1,2,3],"sampling_params":{"max_new_tokens":4,"temperature":0,"ignore_eos":true},"return_logprob":true,"cache_salt":"a"}"#,
        ),
        (
            0,
            r#"{"prompt":["a","b"],"structured_outputs":{"json":{"type":"object","properties":{"a":{"type":"integer"}}}},"echo":true,"n":2,"logit_bias":{"7":-1}}"#,
        ),
        (
            1,
            r#"{"model":"model","messages":[{"role":"user","content":[{"type":"text","text":"Hi"}]}],"tools":[{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object","properties":{"a":{"type":"string"}},"required":["a"]}}}],"tool_choice":"required","parallel_tool_calls":false,"stream":true,"stream_options":{"include_usage":true}}"#,
        ),
        (
            1,
            r#"{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":null,"tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{\"a\":1}"}}]},{"role":"tool","tool_call_id":"c","content":"2"}],"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":{"type":"function","function":{"name":"f"}}}"#,
        ),
        (
            1,
            r#"{"messages":[{"role":"user","content":"Hi"}],"response_format":{"type":"json_schema","json_schema":{"name":"x","strict":true,"schema":{"type":"object","properties":{"a":{"enum":["b",1]}},"required":["a"],"additionalProperties":false}}}}"#,
        ),
        (2, r#"{"text":"Hi","sampling_params":{"regex":"a[bc]{1,3}","max_new_tokens":4}}"#),
        (3, r#"{"prompt":"Hi","add_special_tokens":false,"return_token_strs":true}"#),
        (3, r#"{"tokens":[72,105]}"#),
        (
            4,
            r#"{"model":"model","instructions":"Be.","input":[{"role":"user","content":[{"type":"input_text","text":"Hi"}]},{"type":"function_call","call_id":"c","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"c","output":"2"}],"tools":[{"type":"function","name":"f","parameters":{"type":"object"}}],"store":false,"max_output_tokens":16}"#,
        ),
        (0, r#"{"prompt":["Once",[1,2]],"max_tokens":0,"echo":true,"logprobs":2,"n":2}"#),
        (0, r#"{"prompt":"a.b","max_tokens":9,"min_tokens":3,"stop":".","echo":true,"seed":-1}"#),
        (
            2,
            r#"{"input_ids":[[1,2,3],[4]],"return_logprob":true,"logprob_start_len":1,"top_logprobs_num":2,"stream":true}"#,
        ),
    ];
    bodies.iter().map(|(endpoint, body)| [&[*endpoint][..], body.as_bytes()].concat()).collect()
}

/// Answers with calls in each format, some with thoughts or stop strings.
fn answers() -> Vec<Vec<u8>> {
    let answers: [([u8; 3], &str); 6] = [
        (
            [0, 0, 2],
            "<think>\nso\n</think>\n\nSure.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, \"}\\\"\"]}}\n</tool_call>",
        ),
        (
            [1, 1, 0],
            "STOP\0<|python_tag|>{\"name\": \"f\", \"parameters\": {\"count\": 1}}; {\"name\": \"f\", \"parameters\": {}}",
        ),
        ([2, 2, 4], "[f(count=1, text='x\\n', list=[True, None, {'a': -1.5e3}]), get_weather()]"),
        (
            [3, 0, 1],
            "a\0\0<tool_call>\n<function=f>\n<parameter=text>\n1 < 2\n</parameter>\n<parameter=count>\n3\n</parameter>\n</function>\n</tool_call>",
        ),
        ([4, 0, 3], "Sure.\n```tool_code\nf(count=1, text=\"`\")\nget_weather()\n```\n"),
        (
            [5, 0, 1],
            "So.<start_function_call>call:f{count:1,text:<escape>a, }<escape>,list:[<escape>b<escape>]}<end_function_call>",
        ),
    ];
    answers.iter().map(|(head, text)| [&head[..], text.as_bytes()].concat()).collect()
}

/// A grammar of each kind, with choices among the allowed bytes.
fn grammars() -> Vec<Vec<u8>> {
    let schema = r##"{"type":"object","properties":{"a":{"type":"integer","minimum":3},"b":{"type":"array","items":{"type":"string","pattern":"^x+$"},"maxItems":2},"c":{"anyOf":[{"const":null},{"$ref":"#/$defs/d"}]}},"required":["a"],"$defs":{"d":{"enum":["e",1.5]}}}"##;
    let grammars: [([u8; 2], &str); 6] = [
        ([0, 0], schema),
        ([0, 1], r#"{"type":"string","format":"date"}"#),
        ([1, 0], r"[a-f]{2,3}(\.\d+)?"),
        ([2, 2], "start: a b?\na: /x+/ | \"y\"\nb: \"(\" start \")\""),
        ([3, 0], "root ::= \"a\" item*\nitem ::= [0-9]+ | \"-\" root"),
        ([4, 0], "yes\nno"),
    ];
    grammars
        .iter()
        .map(|(head, text)| [&head[..], text.as_bytes(), b"\0", &[7, 1, 40, 3, 99, 12, 5, 200]].concat())
        .collect()
}

fn manifest() -> String {
    MANIFEST.replace("VERSION", host_plugin_api::VERSION).replace("TARGET", host_plugin_api::note::BUILT_FOR)
}

/// The beginning of a plugin's file: it ends after the plugin's note and the dynamic table.
fn plugin_file() -> Vec<u8> {
    let text = manifest();
    let note = elf::note(host_plugin_api::note::NAME, host_plugin_api::note::TYPE_MANIFEST, text.as_bytes());
    let (at, length) = (512, note.len() as u64);
    let names = b"libone.so\0$ORIGIN/lib\0";
    let dynamic: Vec<u8> = [(5, 400), (1, 0), (29, 10), (0, 0)]
        .iter()
        .flat_map(|(tag, value): &(u64, u64)| [*tag, *value])
        .flat_map(u64::to_le_bytes)
        .collect();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("seed.so");
    let table = at + length.next_multiple_of(8);
    let end = table + dynamic.len() as u64;
    let segments =
        [(elf::LOAD, 0, end), (elf::NOTE, at, length), (elf::DYNAMIC, table, dynamic.len() as u64)];
    elf::object(&path, &segments, &[(400, names), (at, &note), (table, &dynamic)]);
    let mut bytes = std::fs::read(&path).expect("the file that was written");
    bytes.truncate(usize::try_from(end).expect("a small file"));
    bytes
}

fn safetensors() -> Vec<u8> {
    let header = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},"b":{"dtype":"BF16","shape":[2],"data_offsets":[8,12]}}"#;
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 12]].concat()
}

fn lane() -> LaneNotice {
    LaneNotice {
        notice: Notice { room: Room(5), attempt: 1, sequence: 2, pages: 3, last: true },
        fragment: 1,
        fragments: 4,
        sum: 0xfeed_beef,
        alone: false,
        source: 1,
        target: 0,
    }
}

fn staging_messages() -> Vec<Vec<u8>> {
    let key = Key { room: Room(5), attempt: 1, sequence: 2, piece: 3 };
    let span = Span { pages: 7..9, layers: 0..4, heads: 0..2, bytes: 4096 };
    let answer = |verdict| StagingMessage::Answer(Answer { key, repeat: 1, verdict });
    let messages = [
        StagingMessage::Ask(Ask { key, repeat: 0, span }),
        answer(Verdict::Grant { offset: 1 << 20, generation: 7 }),
        answer(Verdict::Wait),
        answer(Verdict::Refused(Refusal::TooLong)),
    ];
    messages.iter().map(|message| message.encode().to_vec()).collect()
}

fn aux_row() -> Vec<u8> {
    let first = Sampled { token: 9, logprob: Some(-0.5), top: vec![(9, -0.5), (11, -1.5)] };
    AuxRow { room: Room(5), attempt: 1, prompt_tokens: 20, cached_tokens: 4, pages: 2, first }
        .encode()
        .to_vec()
}

fn control_messages() -> Vec<Vec<u8>> {
    let reserve = Reserve {
        pages: vec![PageId(1), PageId(2)],
        window: vec![PageId(3)],
        decode_prefix_len: 4,
        prompt_tokens: 12,
        aux_slot: 1,
        namespace: NamespaceKey::default().fingerprint(),
    };
    let message = |answers, body| Message { id: 3, answers, room: Room(5), attempt: 1, body };
    let messages = [
        message(None, Body::Reserve(reserve)),
        message(Some(2), Body::Refused { message: "no".into(), retryable: true }),
    ];
    let mut seeds: Vec<Vec<u8>> =
        messages.iter().map(|message| write_message(message).encode_to_vec()).collect();
    let sampling = proto::Sampling {
        temperature: 1.0,
        top_p: 0.5,
        top_k: 3,
        seed: 7,
        logprobs: Some(2),
        presence_penalty: 0.5,
        logit_bias: vec![proto::TokenBias { token: 2, bias: -1.0 }],
        bad_words: vec![proto::TokenSequence { tokens: vec![1, 2] }],
        ..proto::Sampling::default()
    };
    let request = proto::GenerateRequest {
        room: 5,
        prompt: vec![1, 2, 3],
        max_new_tokens: 4,
        sampling: Some(sampling),
        ..proto::GenerateRequest::default()
    };
    seeds.push(request.encode_to_vec());
    seeds
}

/// News of two workers: events, and a snapshot in two parts.
fn news() -> Vec<u8> {
    let keys = |range: std::ops::Range<u64>| range.map(BlockKey).collect::<Vec<_>>();
    let events = [KvEvent::Stored(keys(0..3)), KvEvent::Removed(keys(2..3)), KvEvent::Cleared];
    let part = |part, last, range| SnapshotPart { number: 9, part, last, keys: keys(range) };
    let pieces: [(u8, CacheNews); 4] = [
        (0, write_batch(1, &events[..2])),
        (1, write_part(&part(0, false, 0..2))),
        (1, write_part(&part(1, true, 2..5))),
        (0, write_batch(3, &events[2..])),
    ];
    let piece = |(worker, news): &(u8, CacheNews)| {
        let bytes = news.encode_to_vec();
        [&[*worker, u8::try_from(bytes.len()).expect("short news")][..], &bytes].concat()
    };
    pieces.iter().flat_map(piece).collect()
}
