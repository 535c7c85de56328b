//! The contract: the content-derived identity under which saved KV may be used (invariant I3).
//!
//! Every field is derived from content (digests, shapes, parameters), never from names or paths. KV
//! saved under a contract that differs in any field is not used, and the refusal names the field.

use kernels::backend::KvType;
use serde::{Deserialize, Serialize};

use super::reuse::KvReuse;

/// 32-byte digest.
pub type Digest = [u8; 32];

/// Type and version of the transport layout of cells (see `kernels::backend::Backend::gather_cell`).
pub fn cell_layout(kv_type: KvType) -> String {
    format!("head-major-kv-{}-1", kv_type.name())
}

/// The type of the elements of cells with this layout, where each stands alone (see [`kernels::codec::elements`]).
pub fn element_type(layout: &str) -> Option<KvType> {
    [KvType::F16, KvType::F32].into_iter().find(|kv_type| cell_layout(*kv_type) == layout)
}

/// Fields that say how near to each other KV of the same meaning is, not what it means.
const NEAR: [&str; 2] = ["kv_layout", "numerics_class"];

/// Where KV is to be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// At the positions that it was computed for.
    Same,
    /// At others: tokens before it were cut out.
    Moved,
}

/// Everything the bits of a cell depend on besides its tokens and positions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contract {
    /// Digest of the weights and of what else in the model's files decides the numbers.
    pub weights_digest: String,
    /// Architecture, shapes and the layer-kind table.
    pub architecture: String,
    /// Digest of the adapters; `none` without one.
    pub adapter_digest: String,
    /// Digest of everything that decides which ids a text gets.
    pub tokenizer_digest: String,
    /// Rotary base, dimensions and pairing.
    pub rope: String,
    /// Storage type of KV and layout version of cells.
    pub kv_layout: String,
    /// Which backends give the same bits.
    pub numerics_class: String,
    /// Codec and policies that shaped the cells; `exact` for cells as they were on the device, `lossless` for the same packed.
    pub lineage: String,
    /// Keeps tenants' cells apart.
    pub tenant_salt: String,
}

/// What KV is good for under another contract than the one it was saved under. Fields are named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Relation {
    /// The contracts are equal, and so are the positions: it is used as it is.
    Share,
    /// The contracts are equal, the positions are not: keys are turned to theirs. What follows is near what would be computed.
    Relocate,
    /// The same meaning from another device, rounding or type of element: it is used, its elements converted. What follows is near
    /// what would be computed.
    Convert(Vec<&'static str>),
    /// The tokens mean the same text; the KV is computed anew.
    Recompute(Vec<&'static str>),
    /// The tokens mean another text or none: there is nothing to recompute from. Nothing is deleted for that.
    Destroy(Vec<&'static str>),
}

impl Relation {
    /// The fields that differ.
    pub fn fields(self) -> Vec<&'static str> {
        match self {
            Self::Share | Self::Relocate => Vec::new(),
            Self::Convert(fields) | Self::Recompute(fields) | Self::Destroy(fields) => fields,
        }
    }
}

impl Contract {
    /// What KV saved under `saved` is good for at `place` here, for a session that wants it `reuse`d so.
    pub fn relation(&self, saved: &Contract, place: Place, reuse: KvReuse) -> Relation {
        let fields = self.differences(saved);
        if fields.contains(&"tokenizer_digest") {
            return Relation::Destroy(fields);
        }
        let elements = || {
            self.kv_layout == saved.kv_layout
                || (element_type(&self.kv_layout).is_some() && element_type(&saved.kv_layout).is_some())
        };
        let approximate = reuse == KvReuse::Approximate;
        match (place, fields.is_empty()) {
            (Place::Same, true) => Relation::Share,
            (Place::Moved, true) if approximate && element_type(&self.kv_layout).is_some() => {
                Relation::Relocate
            }
            (Place::Same, false)
                if approximate && fields.iter().all(|field| NEAR.contains(field)) && elements() =>
            {
                Relation::Convert(fields)
            }
            _ => Relation::Recompute(fields),
        }
    }

    /// The contract of a tenant's cells, which no other tenant's sessions find; this one where no tenant is named.
    #[must_use]
    pub fn of_tenant(&self, name: Option<&str>) -> Self {
        match name {
            // Neither a salt nor a name has a NUL, so that no two pairs are the same text.
            Some(name) => Self { tenant_salt: format!("{}\0{name}", self.tenant_salt), ..self.clone() },
            None => self.clone(),
        }
    }

    /// The contract of cells that a codec packed for a session. What was lost depends on when it left the device, so that no
    /// other session takes such cells for its own.
    #[must_use]
    pub fn packed(&self, codec: &str, session: &str) -> Self {
        Self { lineage: format!("{codec}/{session}"), ..self.clone() }
    }

    /// The contract of cells of a session that takes KV near what would be computed for its own. How near depends on what was
    /// cut out and when, so that no other session takes such cells.
    #[must_use]
    pub fn approximate(&self, codec: &str, session: &str) -> Self {
        Self { lineage: format!("approximate-{codec}/{session}"), ..self.clone() }
    }

    /// The contract of cells that are packed without loss. Their meaning is that of this one's, so that all sessions under it share
    /// them; their bytes are not, so that nobody takes one kind for the other.
    #[must_use]
    pub fn lossless(&self) -> Self {
        Self { lineage: "lossless".to_owned(), ..self.clone() }
    }

    /// Name and value of every field, in the fixed order of the digest.
    pub fn fields(&self) -> [(&'static str, &str); 9] {
        [
            ("weights_digest", &self.weights_digest),
            ("architecture", &self.architecture),
            ("adapter_digest", &self.adapter_digest),
            ("tokenizer_digest", &self.tokenizer_digest),
            ("rope", &self.rope),
            ("kv_layout", &self.kv_layout),
            ("numerics_class", &self.numerics_class),
            ("lineage", &self.lineage),
            ("tenant_salt", &self.tenant_salt),
        ]
    }

    /// BLAKE3 over the tagged, length-prefixed fields.
    pub fn digest(&self) -> Digest {
        let mut hasher = blake3::Hasher::new_derive_key("session-runtime contract 1");
        for (name, value) in self.fields() {
            for part in [name, value] {
                hasher.update(&(part.len() as u64).to_le_bytes());
                hasher.update(part.as_bytes());
            }
        }
        *hasher.finalize().as_bytes()
    }

    /// Names of the fields in which `saved` differs.
    fn differences(&self, saved: &Contract) -> Vec<&'static str> {
        self.fields()
            .iter()
            .zip(saved.fields())
            .filter(|((_, need), (_, have))| need != have)
            .map(|((name, _), _)| *name)
            .collect()
    }
}

/// Lower-case hex of a digest.
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Contract {
        Contract {
            weights_digest: "w".into(),
            architecture: "a".into(),
            adapter_digest: "none".into(),
            tokenizer_digest: "t".into(),
            rope: "r".into(),
            kv_layout: cell_layout(KvType::F16),
            numerics_class: "cpu-2-fast".into(),
            lineage: "exact".into(),
            tenant_salt: String::new(),
        }
    }

    /// The contract with field `index` changed.
    fn changed(index: usize) -> Contract {
        let mut contract = sample();
        let value = format!("{}x", contract.fields()[index].1);
        set(&mut contract, index, value);
        contract
    }

    fn set(contract: &mut Contract, index: usize, value: String) {
        let field = match index {
            0 => &mut contract.weights_digest,
            1 => &mut contract.architecture,
            2 => &mut contract.adapter_digest,
            3 => &mut contract.tokenizer_digest,
            4 => &mut contract.rope,
            5 => &mut contract.kv_layout,
            6 => &mut contract.numerics_class,
            7 => &mut contract.lineage,
            _ => &mut contract.tenant_salt,
        };
        *field = value;
    }

    #[test]
    fn i3_each_field_and_each_pair_of_fields_is_refused_by_name() {
        let base = sample();
        assert_eq!(base.relation(&sample(), Place::Same, KvReuse::Exact), Relation::Share);
        let names = base.fields().map(|(name, _)| name);
        for first in 0..names.len() {
            for second in 0..names.len() {
                let mut saved = changed(first);
                if second != first {
                    let other = changed(second);
                    let value = other.fields()[second].1.to_owned();
                    set(&mut saved, second, value);
                }
                let relation = base.relation(&saved, Place::Same, KvReuse::Exact);
                assert_ne!(saved.digest(), base.digest());
                let foreign = [first, second].iter().any(|field| names[*field] == "tokenizer_digest");
                assert_eq!(matches!(relation, Relation::Destroy(_)), foreign, "{relation:?}");
                let mut wanted = vec![first, second];
                wanted.sort_unstable();
                wanted.dedup();
                let wanted: Vec<&str> = wanted.into_iter().map(|field| names[field]).collect();
                assert_eq!(relation.fields(), wanted);
            }
        }
    }

    /// The table, for a session that takes KV near what would be computed: which of the five answers each field gives, at the same
    /// positions and at others, alone and in pairs.
    #[test]
    fn i3_what_is_near_is_used_only_where_that_is_wanted_and_no_other_field_differs() {
        let base = sample();
        let approximate = KvReuse::Approximate;
        assert_eq!(base.relation(&base, Place::Same, approximate), Relation::Share);
        assert_eq!(base.relation(&base, Place::Moved, approximate), Relation::Relocate);
        assert_eq!(base.relation(&base, Place::Moved, KvReuse::Exact), Relation::Recompute(Vec::new()));
        let wide = Contract { kv_layout: cell_layout(KvType::F32), ..sample() };
        let eight = Contract { kv_layout: cell_layout(KvType::Int8), ..sample() };
        let class = Contract { numerics_class: "cuda-1-f32".into(), ..sample() };
        let both = Contract { numerics_class: "cuda-1-f32".into(), ..wide.clone() };
        let near: [(&Contract, &[&'static str]); 3] = [
            (&wide, &["kv_layout"]),
            (&class, &["numerics_class"]),
            (&both, &["kv_layout", "numerics_class"]),
        ];
        for (saved, fields) in near {
            assert_eq!(base.relation(saved, Place::Same, approximate), Relation::Convert(fields.to_vec()));
            for (place, reuse) in [(Place::Same, KvReuse::Exact), (Place::Moved, approximate)] {
                assert_eq!(base.relation(saved, place, reuse), Relation::Recompute(fields.to_vec()));
            }
            for index in 0..base.fields().len() {
                let mut saved = saved.clone();
                let (name, value) =
                    saved.fields().map(|(name, value)| (name, format!("{value}x")))[index].clone();
                set(&mut saved, index, value);
                let relation = base.relation(&saved, Place::Same, approximate);
                match name {
                    "numerics_class" => assert!(matches!(relation, Relation::Convert(_)), "{relation:?}"),
                    "tokenizer_digest" => assert!(matches!(relation, Relation::Destroy(_)), "{relation:?}"),
                    _ => assert!(matches!(relation, Relation::Recompute(_)), "{name}: {relation:?}"),
                }
                assert!(relation.fields().contains(&name));
            }
        }
        // Elements that share scales are neither turned nor converted.
        assert_eq!(eight.relation(&eight, Place::Moved, approximate), Relation::Recompute(Vec::new()));
        assert_eq!(base.relation(&eight, Place::Same, approximate), Relation::Recompute(vec!["kv_layout"]));
        let other_class = Contract { numerics_class: "cuda-1-f32".into(), ..eight.clone() };
        let fields = vec!["numerics_class"];
        assert_eq!(eight.relation(&other_class, Place::Same, approximate), Relation::Convert(fields));
    }

    #[test]
    fn i3_moving_a_character_between_fields_changes_the_digest() {
        let mut left = sample();
        left.adapter_digest = "nonet".into();
        left.tokenizer_digest = String::new();
        let mut right = sample();
        right.adapter_digest = "none".into();
        right.tokenizer_digest = "t".into();
        assert_ne!(left.digest(), right.digest());
    }
}
