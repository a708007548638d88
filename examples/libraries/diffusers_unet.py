"""A diffusion model of digits with diffusers: noise schedule, EMA of the weights, LoRA, and a pipeline that samples."""

import torch
import torch.nn.functional as F
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DConditionModel, UNet2DModel
from diffusers.training_utils import EMAModel
from peft import LoraConfig
from sklearn.datasets import load_digits

BLOCKS = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "layers_per_block": 1, "norm_num_groups": 8}


def unet():
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    return UNet2DModel(**BLOCKS, **blocks, block_out_channels=(16, 32)), {}


def lora():
    blocks = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    }
    network = UNet2DConditionModel(
        **BLOCKS, **blocks, block_out_channels=(16, 32), cross_attention_dim=16, attention_head_dim=8
    )
    network.requires_grad_(False)
    network.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    return network, {"encoder_hidden_states": torch.randn(16, 4, 16)}


CASES = {"UNet with EMA": unet, "UNet with LoRA": lora}


def main(steps=20, case="UNet with EMA"):
    torch.manual_seed(1)
    model, conditions = CASES[case]()
    images = torch.tensor(load_digits().images / 8 - 1, dtype=torch.float32).unsqueeze(1)
    noises = DDPMScheduler(num_train_timesteps=50)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    average = EMAModel(trained, decay=0.9)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        clean = images[torch.randint(len(images), (16,), generator=generator)]
        noise = torch.randn(clean.shape, generator=generator)
        times = torch.randint(50, (16,), generator=generator)
        loss = F.mse_loss(model(noises.add_noise(clean, noise, times), times, **conditions).sample, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.step(trained)
        losses.append(loss.item())
    if not conditions:
        average.copy_to(trained)
        pipeline = DDPMPipeline(model, noises)
        pipeline.set_progress_bar_config(disable=True)
        sample = pipeline(1, torch.Generator().manual_seed(1), num_inference_steps=5, output_type="np").images
        losses.append(float(sample.sum()))
    return losses


if __name__ == "__main__":
    for case in CASES:
        print(f"{case}: the last number is {main(case=case)[-1]:.3f}")
