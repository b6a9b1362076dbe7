from specax import SamplingParams


def test_greedy_equals_transformers(golden_llm, golden):
    prompts = [row.tolist() for row in golden["tokens"]]
    outs = golden_llm.generate(prompts, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
    assert [o.outputs[0].token_ids for o in outs] == golden["greedy"].tolist()


def test_sampled(tiny_model):
    from specax.decoding.engine import Engine
    from specax.decoding.config import EngineConfig

    e = Engine(tiny_model, EngineConfig(page_size=4, num_pages=40, max_rows=4, max_batched_tokens=16))
    e.submit([1, 2, 3], SamplingParams(n=3, seed=5, top_k=5, top_p=0.9, min_p=0.01, logprobs=3, prompt_logprobs=2, repetition_penalty=1.2, max_tokens=9, logit_bias={4: 2.0}))
    while e.has_work:
        for o in e.step():
            print(o)
    print(e.stats())
