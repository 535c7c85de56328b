//! Writes small GGUF files for tests, following the format's specification and nothing of the reader.
#![allow(dead_code, unreachable_pub, missing_docs, clippy::unwrap_used)]

/// A metadata value, encoded: type id and bytes.
#[derive(Clone, Debug)]
pub struct Encoded(pub u32, pub Vec<u8>);

/// An unsigned 32-bit value.
pub fn u32(value: u32) -> Encoded {
    Encoded(4, value.to_le_bytes().to_vec())
}

/// A 32-bit float.
pub fn f32(value: f32) -> Encoded {
    Encoded(6, value.to_le_bytes().to_vec())
}

/// A boolean.
pub fn boolean(value: bool) -> Encoded {
    Encoded(7, vec![u8::from(value)])
}

/// A string.
pub fn string(value: &str) -> Encoded {
    Encoded(8, text(value))
}

/// An array of values of one type.
pub fn array(element_type: u32, elements: &[Encoded]) -> Encoded {
    let mut bytes = element_type.to_le_bytes().to_vec();
    bytes.extend((elements.len() as u64).to_le_bytes());
    elements.iter().for_each(|element| bytes.extend(&element.1));
    Encoded(9, bytes)
}

/// An array of strings.
pub fn strings<S: AsRef<str>>(values: &[S]) -> Encoded {
    array(8, &values.iter().map(|value| string(value.as_ref())).collect::<Vec<_>>())
}

/// An array of 32-bit signed integers.
pub fn i32s(values: &[i32]) -> Encoded {
    array(5, &values.iter().map(|value| Encoded(5, value.to_le_bytes().to_vec())).collect::<Vec<_>>())
}

fn text(value: &str) -> Vec<u8> {
    let mut bytes = (value.len() as u64).to_le_bytes().to_vec();
    bytes.extend(value.as_bytes());
    bytes
}

/// A tensor: name, dimensions (contiguous first), ggml type id, bytes.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: String,
    pub dimensions: Vec<u64>,
    pub type_id: u32,
    pub bytes: Vec<u8>,
}

impl Tensor {
    /// A float32 tensor of `rows x cols` values (a vector when `rows` is 0).
    pub fn f32(name: &str, rows: u64, cols: u64, values: impl Iterator<Item = f32>) -> Tensor {
        let dimensions = if rows == 0 { vec![cols] } else { vec![cols, rows] };
        let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
        assert_eq!(bytes.len() as u64, rows.max(1) * cols * 4);
        Tensor { name: name.to_owned(), dimensions, type_id: 0, bytes }
    }
}

/// A file in the making.
#[derive(Clone, Debug)]
pub struct GgufFile {
    pub version: u32,
    pub alignment: usize,
    pub keys: Vec<(String, Encoded)>,
    pub tensors: Vec<Tensor>,
}

impl Default for GgufFile {
    fn default() -> GgufFile {
        GgufFile { version: 3, alignment: 32, keys: Vec::new(), tensors: Vec::new() }
    }
}

impl GgufFile {
    /// Sets a metadata key.
    pub fn set(&mut self, key: &str, value: Encoded) -> &mut GgufFile {
        self.keys.retain(|(name, _)| name != key);
        self.keys.push((key.to_owned(), value));
        self
    }

    /// Removes a metadata key.
    pub fn unset(&mut self, key: &str) -> &mut GgufFile {
        self.keys.retain(|(name, _)| name != key);
        self
    }

    /// The bytes of the file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        for (key, Encoded(type_id, bytes)) in &self.keys {
            out.extend(text(key));
            out.extend(type_id.to_le_bytes());
            out.extend(bytes);
        }
        let mut offset = 0;
        for tensor in &self.tensors {
            out.extend(text(&tensor.name));
            out.extend((tensor.dimensions.len() as u32).to_le_bytes());
            tensor.dimensions.iter().for_each(|size| out.extend(size.to_le_bytes()));
            out.extend(tensor.type_id.to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset = (offset + tensor.bytes.len()).next_multiple_of(self.alignment);
        }
        for tensor in &self.tensors {
            out.resize(out.len().next_multiple_of(self.alignment), 0);
            out.extend(&tensor.bytes);
        }
        out
    }
}

/// Sizes of a made-up model.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub layers: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub ffn: u32,
}

impl Default for Sizes {
    fn default() -> Sizes {
        Sizes { layers: 2, heads: 4, kv_heads: 2, head_dim: 16, ffn: 96 }
    }
}

/// A complete made-up model of `architecture` (`llama`, `qwen2` or `qwen3`) with float32 weights that depend only on
/// their place, a byte-level vocabulary of 256 bytes, a few merges and ChatML control tokens.
pub fn small_model(architecture: &str, sizes: Sizes) -> GgufFile {
    let mut file = GgufFile::default();
    let qwen = architecture == "qwen2";
    let Sizes { layers, heads, kv_heads, head_dim, ffn } = sizes;
    let wide = heads * head_dim;
    // Heads of qwen3 need not have the width of the residual stream together.
    let hidden = if architecture == "qwen3" { wide / 2 } else { wide };
    if architecture == "qwen3" {
        file.set("qwen3.attention.key_length", u32(head_dim));
        file.set("qwen3.attention.value_length", u32(head_dim));
    }
    file.set("general.architecture", string(architecture));
    for (name, value) in [
        ("block_count", layers),
        ("context_length", 512),
        ("embedding_length", hidden),
        ("feed_forward_length", ffn),
        ("attention.head_count", heads),
        ("attention.head_count_kv", kv_heads),
    ] {
        file.set(&format!("{architecture}.{name}"), u32(value));
    }
    file.set(&format!("{architecture}.attention.layer_norm_rms_epsilon"), f32(1e-5));
    file.set(&format!("{architecture}.rope.freq_base"), f32(10_000.0));
    let vocab = set_vocabulary(&mut file, if architecture == "llama" { "smollm" } else { "qwen2" });
    let mut seed = 0x9E37_79B9u32;
    let mut next = move |scale: f32| {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((seed >> 8) as f32 / (1 << 24) as f32 - 0.5) * scale
    };
    let mut matrix = |file: &mut GgufFile, name: &str, rows: u32, cols: u32| {
        let values = (0..rows * cols).map(|_| next(0.4)).collect::<Vec<_>>();
        file.tensors.push(Tensor::f32(name, rows.into(), cols.into(), values.into_iter()));
    };
    let vector = |file: &mut GgufFile, name: &str, width: u32, value: f32| {
        file.tensors.push(Tensor::f32(name, 0, width.into(), (0..width).map(|_| value)));
    };
    matrix(&mut file, "token_embd.weight", vocab, hidden);
    vector(&mut file, "output_norm.weight", hidden, 1.0);
    for layer in 0..layers {
        let name = |part: &str| format!("blk.{layer}.{part}");
        for (part, rows, cols) in [
            ("attn_q.weight", wide, hidden),
            ("attn_k.weight", kv_heads * head_dim, hidden),
            ("attn_v.weight", kv_heads * head_dim, hidden),
            ("attn_output.weight", hidden, wide),
            ("ffn_gate.weight", ffn, hidden),
            ("ffn_up.weight", ffn, hidden),
            ("ffn_down.weight", hidden, ffn),
        ] {
            matrix(&mut file, &name(part), rows, cols);
        }
        vector(&mut file, &name("attn_norm.weight"), hidden, 1.0);
        vector(&mut file, &name("ffn_norm.weight"), hidden, 1.0);
        if architecture == "qwen3" {
            vector(&mut file, &name("attn_q_norm.weight"), head_dim, 1.5);
            vector(&mut file, &name("attn_k_norm.weight"), head_dim, 0.75);
        }
        if qwen {
            vector(&mut file, &name("attn_q.bias"), hidden, 0.125);
            vector(&mut file, &name("attn_k.bias"), kv_heads * head_dim, -0.25);
            vector(&mut file, &name("attn_v.bias"), kv_heads * head_dim, 0.5);
        }
    }
    file
}

/// A byte-level vocabulary of 256 bytes, three merges and four whole tokens; returns its size.
pub fn set_vocabulary(file: &mut GgufFile, pre: &str) -> u32 {
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut others = 0;
    let mut tokens: Vec<String> = (0..=255u8)
        .map(|byte| {
            let character = if printable(&byte) {
                char::from(byte)
            } else {
                others += 1;
                char::from_u32(0x100 + others - 1).unwrap()
            };
            character.to_string()
        })
        .collect();
    tokens.extend(["he", "ll", "hell"].map(String::from));
    let mut kinds = vec![1; tokens.len()];
    tokens
        .extend(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "[PAD263]"].map(String::from));
    kinds.extend([3, 3, 3, 4, 5]);
    let end = tokens.len() as u32;
    file.set("tokenizer.ggml.model", string("gpt2"));
    file.set("tokenizer.ggml.pre", string(pre));
    file.set("tokenizer.ggml.tokens", strings(&tokens));
    file.set("tokenizer.ggml.token_type", i32s(&kinds));
    file.set("tokenizer.ggml.merges", strings(&["h e", "l l", "he ll"]));
    file.set("tokenizer.ggml.eos_token_id", u32(end - 3));
    file.set("tokenizer.ggml.bos_token_id", u32(end - 5));
    let template = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] \
                    + '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}\
                    {% endif %}";
    file.set("tokenizer.chat_template", string(template));
    end
}
