//! The file that `--config` names. Flags win over it.

use std::fmt::Display;
use std::str::FromStr;

use host_wire::endpoint::ListenAt;
use serde::{Deserialize, Deserializer, de};

use super::{Settings, suggestion};
use crate::cli::Refused;

/// Merges flags and file. Every setting must be in one of the lists, or the code does not compile.
macro_rules! flags_over_file {
    (
        $flags:ident, $file:ident,
        flag_wins: [$($wins:ident)*],
        on_in_either: [$($on:ident)*],
        of_the_file: [$($table:ident)*],
        of_the_flags: [$($flag:ident)*],
    ) => {
        let Settings { $($wins,)* $($on,)* $($table,)* $($flag: _,)* } = $file;
        $( $flags.$wins = $flags.$wins.or($wins); )*
        $( $flags.$on |= $on; )*
        $( $flags.$table = $table; )*
    };
}

impl Settings {
    /// Merges these flags with the file that `--config` names. Flags take precedence.
    ///
    /// # Errors
    /// When the file cannot be read, or has a key that is no setting.
    pub fn with_file(mut self) -> anyhow::Result<Self> {
        for (is_off, switch) in [
            (self.no_decode_radix_cache, &mut self.decode_radix_cache),
            (self.no_prefill_radix_cache, &mut self.prefill_radix_cache),
            (self.no_hierarchical_cache, &mut self.hierarchical_cache),
        ] {
            if is_off {
                *switch = Some(false);
            }
        }
        let Some(path) = self.config.clone() else { return Ok(self) };
        let shown = path.display();
        let text = std::fs::read_to_string(&path)
            .map_err(|error| Refused(format!("the configuration {shown} cannot be read: {error}")))?;
        let file: Settings = toml::from_str(&text).map_err(|error| {
            let hint = suggestion::hint(&text).map(|hint| hint + "\n").unwrap_or_default();
            Refused(format!("the configuration {shown} is wrong: {hint}{error}"))
        })?;
        flags_over_file!(self, file,
            flag_wins: [
                model tokenizer chat_template tool_parser reasoning_parser served_model_name executor cuda_device nvrtc cuda_math role plugins transfer plugins_dir plugin_publishers plugin_call_timeout host port
                api_keys tenant_header tls_cert tls_key admin allowed_hosts max_requests
                max_connections max_body_bytes max_uploads max_upload_bytes max_text_bytes max_answer_bytes body_timeout idle_timeout
                stream_keep_alive cors_origins
                request_timeout transfer_timeout retry_timeout drain_timeout control router cluster_secret cluster_certs metrics router_policy name
                page_size pool_pages kv_memory kv_dtype kv_layout chunk_tokens layer_groups staging staging_bytes
                staging_knee hicache_memory hicache_storage hicache_write_policy hicache_prefetch_policy allocator
                swa_full_tokens_ratio radix_eviction max_batch reserved_decode_tokens target_itl_ms speculate draft_tokens max_running max_queued
                max_model_len default_max_tokens threads tp prefill_tp decode_tp log_format log_level hicache synthetic
                start_companion decode_radix_cache prefill_radix_cache hierarchical_cache
            ],
            on_in_either: [
                insecure_control insecure_api insecure_plugin_permissions plugins_may_abort no_page_integrity no_request_log no_resume no_warm_up
            ],
            of_the_file: [plugin companion],
            of_the_flags: [
                config set listen_fds supervised no_decode_radix_cache no_prefill_radix_cache no_hierarchical_cache
            ],
        );
        Ok(self)
    }
}

/// Reads a key whose value is a word or a number. Parses it like the flag.
pub(super) fn word_or_number<'de, D, T>(value: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err: Display>,
{
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Either {
        Number(i64),
        Word(String),
    }
    let word = match Either::deserialize(value)? {
        Either::Number(number) => number.to_string(),
        Either::Word(word) => word,
    };
    word.parse().map(Some).map_err(de::Error::custom)
}

/// Reads an address. Parses it like the flag.
pub(super) fn address<'de, D: Deserializer<'de>>(value: D) -> Result<Option<ListenAt>, D::Error> {
    let text = String::deserialize(value)?;
    text.parse().map(Some).map_err(|error| de::Error::custom(format!("{text:?} {error}")))
}

/// Reads a list of names. A single name may be written without brackets.
pub(super) fn one_or_several<'de, D: Deserializer<'de>>(value: D) -> Result<Option<Vec<String>>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Either {
        One(String),
        Several(Vec<String>),
    }
    Ok(Some(match Either::deserialize(value)? {
        Either::One(name) => vec![name],
        Either::Several(names) => names,
    }))
}

#[cfg(test)]
mod tests {
    use host_core::layer_groups::Wish;

    use super::*;

    #[test]
    fn flags_win_over_the_file_and_unknown_keys_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("host.toml");
        std::fs::write(&path, "port = 1\npage-size = 32\nlayer-groups = 4\n[plugin.shm]\nrails = 2\n")
            .unwrap();
        let flags = Settings { config: Some(path.clone()), port: Some(2), ..Settings::default() };
        let settings = flags.clone().with_file().unwrap();
        assert_eq!((settings.port, settings.page_size), (Some(2), Some(32)));
        assert_eq!(settings.layer_groups, Some(Wish::Groups(4)));
        assert!(settings.plugin.contains_key("shm"));
        std::fs::write(&path, "prefill-radix-cache = false\ndecode-radix-cache = true\n").unwrap();
        let off = Settings { no_decode_radix_cache: true, ..flags.clone() }.with_file().unwrap();
        assert_eq!((off.prefill_radix_cache, off.decode_radix_cache), (Some(false), Some(false)));
        for (wrong, says) in [
            ("prot = 1\n", "prot"),
            ("radix-eviction = \"mru\"\n", "`mru`, expected one of `lru`, `lfu`, `slru`, `priority`"),
            ("hicache-write-policy = \"write-back\"\n", "`write_through_selective`, `write_back`"),
            ("staging = \"some\"\n", "use auto, always or never"),
            ("kv-memory = \"lots\"\n", "\"lots\" is not a size"),
            ("[hicache]\nwrite-bytes = \"much\"\n", "\"much\" is not a size"),
            ("control = \"4000\"\n", "\"4000\" is neither IP:PORT nor unix:PATH"),
            ("layer-groups = 0\n", "use auto, off or 2 to 32"),
        ] {
            std::fs::write(&path, wrong).unwrap();
            let message = format!("{:#}", flags.clone().with_file().unwrap_err());
            assert!(message.contains(says) && message.contains("host.toml"), "{message}");
        }
    }
}
