"""Parameters that say how tokens are chosen."""

from __future__ import annotations

from llmserve_trtllm.parameters.parameter import count, switch, words

_MODES = (
    "top_k",
    "top_p",
    "top_k_top_p",
    "beam_search",
    "medusa",
    "redrafter",
    "lookahead",
    "eagle",
)

DECODING = (
    count("max_beam_width", 1, "Most beams that a request may ask for.", low=1),
    words(
        "decoding_mode",
        "How tokens are chosen; by default as the engine and max_beam_width want it.",
        _MODES,
    ),
    switch("normalize_log_probs", True, "Whether log probabilities are normalised."),
    words("medusa_choices", "Tree of Medusa's choices, as in {0, 0, 0}, {0, 1}."),
    words("eagle_choices", "Tree of Eagle's choices, as in {0, 0, 0}, {0, 1}.", since="0.19"),
    count("lookahead_window_size", 0, "Window of lookahead decoding; 0 is off.", since="0.19"),
    count("lookahead_ngram_size", 0, "Length of lookahead decoding's n-grams.", since="0.19"),
    count("lookahead_verification_set_size", 0, "N-grams verified at a time.", since="0.19"),
    switch(
        "speculative_decoding_fast_logits",
        False,
        "Hand the draft's logits over between processes directly.",
        since="0.19",
    ),
)

GUIDED = (
    words(
        "guided_decoding_backend",
        "xgrammar makes requests with guided_decoding_guide keep to it.",
        ("xgrammar",),
        since="0.19",
    ),
    words(
        "xgrammar_tokenizer_info_path",
        "JSON that xgrammar wrote of the tokenizer.",
        since="0.19",
    ),
)
