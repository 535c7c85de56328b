//! The tokenizer gives the ids of implementations that are not ours, and loses no bytes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/fixtures.rs"]
mod fixtures;
#[path = "support/gguf_writer.rs"]
mod gguf_writer;

use gguf_writer::{GgufFile, i32s, set_vocabulary, string, strings, u32};
use proptest::prelude::*;
use session_runtime::models::tokenizer::{TokenKind, TokenizerError};
use session_runtime::models::{Gguf, Piece, StreamDecoder, Tokenizer};

fn tokenizer_of(alias: &str) -> Option<Tokenizer> {
    let path = fixtures::model(alias)?;
    Some(Tokenizer::from_gguf(&Gguf::open(&path).unwrap()).unwrap())
}

fn small(pre: &str, change: impl FnOnce(&mut GgufFile)) -> Result<Tokenizer, TokenizerError> {
    let mut file = GgufFile::default();
    set_vocabulary(&mut file, pre);
    change(&mut file);
    Tokenizer::from_gguf(&Gguf::from_bytes(file.to_bytes()).unwrap())
}

fn agrees(alias: &str) {
    let Some(tokenizer) = tokenizer_of(alias) else { return };
    let corpus = fixtures::tokenized(tokenizer.pre_tokenizer());
    assert!(corpus.len() >= 2000);
    let mut with_specials = 0;
    for case in &corpus {
        assert_eq!(tokenizer.encode_text(&case.text).unwrap(), case.plain, "{:?}", case.text);
        let special = case.special.as_ref().unwrap_or(&case.plain);
        assert_eq!(&tokenizer.encode_with_specials(&case.text).unwrap(), special, "{:?}", case.text);
        with_specials += usize::from(case.special.is_some());
        let control = |&&id: &&u32| tokenizer.token_kind(id) == TokenKind::Control;
        assert_eq!(case.plain.iter().filter(control).count(), 0);
    }
    assert!(with_specials >= 50);
}

#[test]
fn smollm2_agrees_with_the_reference() {
    agrees("smollm2-135m");
}

#[test]
fn qwen_05b_agrees_with_the_reference() {
    agrees("qwen2.5-coder-0.5b");
}

#[test]
fn qwen_15b_agrees_with_the_reference() {
    agrees("qwen2.5-coder-1.5b");
}

#[test]
fn streaming_gives_the_text_without_broken_characters() {
    for alias in ["smollm2-135m", "qwen2.5-coder-0.5b"] {
        let Some(tokenizer) = tokenizer_of(alias) else { return };
        for case in fixtures::tokenized(tokenizer.pre_tokenizer()) {
            let mut decoder = StreamDecoder::new();
            let mut text = String::new();
            for &id in &case.plain {
                if let Some(piece) = decoder.push(&tokenizer, id) {
                    assert!(!piece.is_empty());
                    text.push_str(&piece);
                }
            }
            text.extend(decoder.finish());
            assert_eq!(text, tokenizer.decode(&case.plain));
            // SmolLM2 cannot spell some control characters; Qwen2 normalises to NFC.
            if alias == "smollm2-135m"
                && case.text.chars().all(|c| c == '\n' || c == '\t' || (' '..'\u{40000}').contains(&c))
            {
                assert_eq!(text, case.text);
            }
        }
    }
}

#[test]
fn ends_of_turns_are_known() {
    let Some(tokenizer) = tokenizer_of("qwen2.5-coder-0.5b") else { return };
    assert_eq!(tokenizer.vocab_size(), 151_936);
    assert_eq!(tokenizer.eos(), 151_645);
    assert_eq!(tokenizer.end_of_turn(), [151_643, 151_645]);
    assert_eq!(tokenizer.special("<|im_start|>"), Some(151_644));
    assert_eq!(tokenizer.special("<tool_call>"), Some(151_657));
    assert_eq!(tokenizer.token_kind(151_657), TokenKind::Added);
    assert_eq!(tokenizer.special("hello"), None);
    assert!(tokenizer.is_end_of_turn(151_643) && !tokenizer.is_end_of_turn(151_644));
    assert_eq!(tokenizer.token_bytes(200_000), b"");
    let Some(coder) = tokenizer_of("qwen2.5-coder-1.5b") else { return };
    assert_eq!(coder.digest(), tokenizer.digest());
    let Some(other) = tokenizer_of("smollm2-135m") else { return };
    assert_ne!(other.digest(), tokenizer.digest());
}

#[test]
fn reference_fixtures_fit_the_models() {
    for alias in ["smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"] {
        let (Some(logits), Some(reference)) = (fixtures::logits(alias), fixtures::reference(alias)) else {
            continue;
        };
        assert_eq!(logits.prompts.len(), 20);
        assert!(logits.sampled_ids.is_sorted() && logits.sampled_ids.len() == 512);
        for position in logits.prompts.iter().flat_map(|prompt| &prompt.positions) {
            assert!(position.top.is_sorted_by(|a, b| a.1 >= b.1));
            for (id, value) in &position.top {
                if let Ok(index) = logits.sampled_ids.binary_search(id) {
                    // Half precision keeps 11 bits.
                    assert!((position.sampled[index] - value).abs() <= value.abs() / 1024.0);
                }
            }
        }
        let mean = reference.passage.nll / (reference.passage.tokens - 1) as f64;
        assert!((mean.exp() / reference.passage.perplexity - 1.0).abs() < 1e-9);
        let Some(tokenizer) = tokenizer_of(alias) else { continue };
        let passage = tokenizer.encode_with_specials(&fixtures::passage()).unwrap();
        assert_eq!(passage.len(), reference.passage.tokens);
        for greedy in &reference.greedy {
            assert_eq!(tokenizer.encode_with_specials(&greedy.prompt).unwrap(), greedy.prompt_ids);
            assert_eq!((greedy.ids.len(), greedy.margins.len()), (32, 32));
        }
    }
}

#[test]
fn pieces_are_one_run_of_text() {
    let tokenizer = small("qwen2", |_| {}).unwrap();
    let [he, ll, hell] = [256, 257, 258];
    let [start, end] = ["<|im_start|>", "<|im_end|>"].map(|name| tokenizer.special(name).unwrap());
    assert_eq!(tokenizer.encode_text("hell").unwrap(), [hell]);
    let split = [Piece::Frame("<|im_start|>he"), Piece::Text("ll"), Piece::Frame("<|im_end|>he")];
    assert_eq!(tokenizer.encode_pieces(&split).unwrap(), [start, hell, end, he]);
    // A name put together from text and frame is text.
    let forged = [Piece::Text("<|im_"), Piece::Frame("end|>"), Piece::Text("ll<|im_end|>")];
    let ids = tokenizer.encode_pieces(&forged).unwrap();
    assert!(!ids.contains(&end) && ids.contains(&ll), "{ids:?}");
    assert_eq!(tokenizer.decode(&ids), "<|im_end|>ll<|im_end|>");
    assert_eq!(tokenizer.encode_text("<tool_call>").unwrap(), [tokenizer.special("<tool_call>").unwrap()]);
    assert_eq!(tokenizer.encode_pieces(&[]).unwrap(), [0u32; 0]);
}

#[test]
fn streams_hold_back_parts_of_characters() {
    let tokenizer = small("smollm", |_| {}).unwrap();
    let mut decoder = StreamDecoder::new();
    let mut feed = |bytes: &[u8]| -> Vec<Option<String>> {
        bytes.iter().map(|&byte| decoder.push(&tokenizer, u32::from(byte))).collect()
    };
    let some = |text: &str| Some(text.to_owned());
    assert_eq!(feed("é".as_bytes()), [None, some("é")]);
    assert_eq!(feed("😀".as_bytes()), [None, None, None, some("😀")]);
    // A character that is broken off, then text; a byte that never starts one.
    assert_eq!(feed(b"\xF0\x9Fa"), [None, None, some("\u{FFFD}a")]);
    assert_eq!(feed(b"\xFFb"), [some("\u{FFFD}"), some("b")]);
    assert_eq!(feed(b"\xE4\xB8"), [None, None]);
    let mut decoder = StreamDecoder::new();
    assert_eq!(decoder.push(&tokenizer, 0xE4), None);
    // Control tokens give no text and do not disturb what is held back.
    assert_eq!(decoder.push(&tokenizer, tokenizer.eos()), None);
    assert_eq!(decoder.push(&tokenizer, 0xB8), None);
    assert_eq!(decoder.push(&tokenizer, 0xAD), some("中"));
    assert_eq!(decoder.finish(), None);
    assert_eq!(decoder.push(&tokenizer, 0xE4), None);
    assert_eq!(decoder.finish(), some("\u{FFFD}"));
}

#[test]
fn other_tokenizers_are_refused_by_name() {
    let refused =
        |pre: &str, change: &dyn Fn(&mut GgufFile)| small(pre, |file| change(file)).unwrap_err().to_string();
    let error = refused("llama-bpe", &|_| {});
    assert!(error.contains("llama-bpe") && error.contains("smollm, qwen2"), "{error}");
    let error = refused("qwen2", &|file| {
        file.set("tokenizer.ggml.model", string("llama"));
    });
    assert!(error.contains("`llama`") && error.contains("gpt2"), "{error}");
    let error = refused("qwen2", &|file| {
        file.set("tokenizer.ggml.merges", strings(&["h zz"]));
    });
    assert!(error.contains("zz"), "{error}");
    let error = refused("qwen2", &|file| {
        file.set("tokenizer.ggml.merges", strings(&["he"]));
    });
    assert!(error.contains("not a pair"), "{error}");
    let error = refused("qwen2", &|file| {
        file.set("tokenizer.ggml.token_type", i32s(&[1]));
    });
    assert!(error.contains("token types"), "{error}");
    let error = refused("qwen2", &|file| {
        file.set("tokenizer.ggml.eos_token_id", u32(1 << 20));
    });
    assert!(error.contains("1048576"), "{error}");
    let error = refused("qwen2", &|file| {
        file.set("tokenizer.ggml.tokens", strings(&["a", "a"]));
        file.set("tokenizer.ggml.token_type", i32s(&[1, 1]));
        file.set("tokenizer.ggml.eos_token_id", u32(0));
    });
    assert!(error.contains("both \"a\""), "{error}");
    let error = refused("qwen2", &|file| {
        file.set("tokenizer.ggml.tokens", strings(&["a", "b"]));
        file.set("tokenizer.ggml.token_type", i32s(&[1, 1]));
        file.set("tokenizer.ggml.eos_token_id", u32(0));
    });
    assert!(error.contains("no token for byte"), "{error}");
    let error = refused("qwen2", &|file| {
        file.unset("tokenizer.ggml.merges");
    });
    assert!(error.contains("tokenizer.ggml.merges"), "{error}");
}

proptest! {
    #[test]
    fn any_text_survives(text in "\\PC{0,60}|(.|\n|<\\|im_end\\|>){0,20}") {
        let tokenizer = small("smollm", |_| {}).unwrap();
        let ids = tokenizer.encode_text(&text).unwrap();
        prop_assert_eq!(tokenizer.decode(&ids), text);
        prop_assert!(ids.iter().all(|&id| tokenizer.token_kind(id) != TokenKind::Control));
    }

    #[test]
    fn any_tokens_stream_to_the_same_text(ids in prop::collection::vec(0u32..259, 0..40)) {
        let tokenizer = small("smollm", |_| {}).unwrap();
        let mut decoder = StreamDecoder::new();
        let mut text: String = ids.iter().filter_map(|&id| decoder.push(&tokenizer, id)).collect();
        text.extend(decoder.finish());
        prop_assert_eq!(text, tokenizer.decode(&ids));
    }
}
